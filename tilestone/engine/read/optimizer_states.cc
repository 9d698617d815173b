#include "tilestone/engine/read/optimizer_states_internal.h"

#include <algorithm>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/deliver_internal.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/folded_memory_internal.h"

namespace tilestone::engine {
namespace {

constexpr const char* kParamState = "param_state";  // the object of dp_zero_gather_scatter
constexpr const char* kPassLayouts =
    "to read buckets into another TP or PP layout, pass the layouts of the job that saved them as "
    "`layouts=`, or save with `layout_object`";
constexpr const char* kAllLayouts =
    "give the layouts of all model-parallel ranks of the job that saved";

const Value* entry_under(const Value* dict, const Value& key) {
  if (dict == nullptr || dict->kind() != Value::Kind::kDict) return nullptr;
  for (const auto& [name, value] : dict->as_dict()) {
    if (name == key) return &value;
  }
  return nullptr;
}

std::string first_of(const OptimizerLayout& layout) {
  for (const LayoutBuffer& buffer : layout.buffers) {
    for (const LayoutBucket& bucket : buffer.buckets) {
      if (!bucket.parameters.empty()) return bucket.parameters.front().key;
    }
  }
  return layout.prefix();
}

// Throws: a flat tensor of `there` elements is stored instead of the bucket that begins at element
// `before` of it.
[[noreturn]] void fail_size(const LayoutBucket& bucket, int64_t before, int64_t there,
                            const std::string& what) {
  std::string name = bucket.parameters.empty() ? what : bucket.parameters.back().key;
  for (const LayoutParameter& parameter : bucket.parameters) {
    if (before + parameter.end() <= there) continue;
    name = parameter.key;
    break;
  }
  fail_layout(name, what + " is stored with " + std::to_string(there) + " elements, but has " +
                        std::to_string(before + bucket.numel) + " in the layout");
}

// The last dims of a target that lacks those of prepended axes.
Dims strides_for(const TensorView& target, const Dims& strides) {
  return Dims(strides.span().subspan(strides.size() - target.shape.size()));
}

// All elements of a tensor in C order as a 1-D tensor. nullopt: they have gaps.
std::optional<TensorView> flattened(const TensorView& target) {
  const Dims shape{numel(target.shape)};
  if (target.device != nullptr) {
    TensorView flat = TensorView::without_data(target.dtype, shape);
    flat.device = state_internal::fold_memory(target.device, shape, itemsize(target.dtype));
    return flat;
  }
  if (!target.strided_view().is_contiguous()) return std::nullopt;
  return TensorView::contiguous(target.data, target.dtype, shape, target.owner);
}

// Copies into `target` the elements of a 1-D tensor from `begin` on that are `strides` apart.
void put_range(const TensorView& target, const TensorView& flat, int64_t begin, Dims strides) {
  const uint64_t size = itemsize(flat.dtype);
  const int64_t step = flat.strides[0];
  for (int64_t& each : strides) each *= step;
  std::byte* const at = flat.data + static_cast<uint64_t>(begin * step) * size;
  put_elements(target, {at, target.shape, std::move(strides), size}, flat.dtype);
}

}  // namespace

void fail_layout(const std::string& parameter, const std::string& problem) {
  throw Error(ErrorCode::kMismatch, "the layout does not fit the checkpoint: " + problem)
      .with_key(parameter);
}

Piece StateReads::range_for(const TensorView& target, int64_t begin, const Dims& strides) {
  int64_t span = 1;
  for (size_t d = 0; d < strides.size(); ++d) span += (target.shape[d] - 1) * strides[d];
  const StridedView there{nullptr, target.shape, strides, 1};
  auto memory = there.is_contiguous() ? flattened(target) : std::nullopt;
  if (!memory) {
    memory = TensorView::allocate(target.dtype, {span});
    scattered.push_back({target, *memory, strides});
  }
  return {Box{{begin}, {span}}, *std::move(memory)};
}

void StateReads::finish() const {
  for (const Scattered& each : scattered) {
    put_elements(each.target,
                 {each.memory.data, each.target.shape, each.strides, itemsize(each.memory.dtype)},
                 each.memory.dtype);
  }
}

// ---- From layouts to the states by parameter

// The states that are wanted.
struct OptimizerStates::Asked {
  explicit Asked(const std::vector<TensorItem>& wanted) {
    for (const TensorItem& item : wanted) {
      const auto key = state_key(item.key);
      if (!key) continue;
      keys.insert(item.key);
      std::vector<Box>& there = boxes[key->second];
      for (const Piece& piece : item.pieces) there.push_back(piece.box);
    }
  }
  std::set<std::string> keys;
  std::map<std::string, std::vector<Box>> boxes;  // by the model's key
};

OptimizerStates::OptimizerStates(const Metadata& stored, ReadObject object,
                                 OptimizerLayouts layouts, const std::vector<TensorItem>* wanted)
    : stored_(stored), object_(std::move(object)), own_(std::move(layouts.own)) {
  find_groups();
  find_layouts(std::move(layouts));
  std::optional<Asked> asked;
  if (wanted != nullptr) {
    asked.emplace(*wanted);
  } else {
    expect_complete();
  }
  try {
    for (const auto& [prefix, layout] : layouts_) add_layout(layout, asked ? &*asked : nullptr);
  } catch (Error& error) {
    if (error.code() == ErrorCode::kMismatch)
      error.with_hint(only_own_ ? kPassLayouts : kLayoutHint);
    throw;
  }
  for (const TensorItem& item : wanted != nullptr ? *wanted : std::vector<TensorItem>()) {
    const auto key = state_key(item.key);
    const auto shape = key ? shapes_.find(key->second) : shapes_.end();
    if (shape == shapes_.end() || by_key_.contains(item.key)) continue;
    StoredTensor& padding = by_key_[item.key];  // all that is wanted of it
    padding.key = item.key;
    padding.dtype = item.dtype;
    padding.shape = shape->second;
  }
  for (auto& [key, tensor] : by_key_) by_parameter_.tensors.push_back(std::move(tensor));
  by_parameter_.index();
}

void OptimizerStates::find_groups() {
  for (const StoredTensor& tensor : stored_.tensors) {
    if (const auto key = group_key(tensor.key)) groups_[key->first].tensors[tensor.key] = &tensor;
  }
  for (const StoredObject& object : stored_.objects) {
    if (const auto key = group_key(object.key)) groups_[key->first].objects[key->second] = &object;
  }
}

void OptimizerStates::find_layouts(OptimizerLayouts layouts) {
  std::vector<OptimizerLayout> found = std::move(layouts.given);
  const bool given = !found.empty();
  for (const auto& [prefix, group] : groups_) {
    const auto object = group.objects.find("layout");
    if (given || object == group.objects.end()) continue;
    found.push_back(optimizer_layout_of(object_(*object->second)));
  }
  only_own_ = found.empty();
  if (only_own_) found = own_;
  if (found.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the optimizer is stored in buckets, which say nothing about the model, and the "
                "checkpoint does not hold their layout")
        .with_key(groups_.begin()->first)
        .with_hint(
            "make a layout file with tilestone.megatron.distributed_optimizer.write_layouts, from "
            "the model on the meta device, and pass it with --layout");
  }
  for (OptimizerLayout& layout : found) {
    const std::string prefix = layout.prefix();
    if (!layouts_.emplace(prefix, std::move(layout)).second) {
      throw Error(ErrorCode::kMismatch, "two layouts were given for " + prefix);
    }
  }
}

void OptimizerStates::expect_complete() const {
  for (const auto& [prefix, group] : groups_) {
    if (layouts_.contains(prefix)) continue;
    throw Error(ErrorCode::kMismatch, "no layout describes the buckets of this rank")
        .with_key(prefix)
        .with_hint(kAllLayouts);
  }
}

void OptimizerStates::add_layout(const OptimizerLayout& layout, const Asked* asked) {
  size_t used = 0;
  for (size_t i = 0; i < layout.buffers.size(); ++i) {
    for (size_t j = 0; j < layout.buffers[i].buckets.size(); ++j) {
      for (const LayoutParameter& parameter : layout.buffers[i].buckets[j].parameters) {
        for (const LayoutPiece& piece : parameter.pieces) {
          if (asked != nullptr && !asked->boxes.contains(piece.key)) continue;
          check_model(parameter, piece, asked == nullptr);
          if (!is_wanted(parameter, piece, asked)) continue;
          add_piece(parameter, piece, flats_of(layout, {i, j}), asked);
        }
      }
      if (asked == nullptr) used += flats_of(layout, {i, j}).size();
    }
  }
  const auto group = groups_.find(layout.prefix());
  if (asked != nullptr || group == groups_.end() || used >= group->second.tensors.size()) return;
  for (const auto& [key, tensor] : group->second.tensors) {
    const auto is_this = [&](const Flat& flat) { return flat.stored == tensor; };
    if (std::any_of(flats_.begin(), flats_.end(), is_this)) continue;
    fail_layout(first_of(layout),
                "it has the bucket \"" + key + "\", in which the layout has no parameter");
  }
}

// Whether some of a piece is wanted and no layout before holds it.
bool OptimizerStates::is_wanted(const LayoutParameter& parameter, const LayoutPiece& piece,
                                const Asked* asked) {
  const auto [shape, first] = shapes_.emplace(piece.key, piece.global_shape);
  if (shape->second != piece.global_shape) {
    fail_layout(parameter.key, "two layouts give \"" + piece.key + "\" the shapes " +
                                   to_string(shape->second) + " and " +
                                   to_string(piece.global_shape));
  }
  if (piece.box.empty()) return false;
  const auto shares = [&](const Box& box) {
    return box.rank() != piece.box.rank() || intersects(box, piece.box);
  };
  if (asked != nullptr) {
    const std::vector<Box>& boxes = asked->boxes.at(piece.key);
    if (std::none_of(boxes.begin(), boxes.end(), shares)) return false;
  }
  return held_.emplace(piece.key, piece.box).second;
}

// Compares a piece with the model's tensor of the same checkpoint. `all`: the checkpoint may have
// no model, but not a part of it.
void OptimizerStates::check_model(const LayoutParameter& parameter, const LayoutPiece& piece,
                                  bool all) const {
  const StoredTensor* const tensor = stored_.find_tensor(piece.key);
  if (tensor == nullptr) {
    const auto is_other = [](const StoredTensor& each) { return !group_key(each.key); };
    if (!all || std::none_of(stored_.tensors.begin(), stored_.tensors.end(), is_other)) return;
    fail_layout(parameter.key, "its model has no tensor \"" + piece.key + "\"");
  }
  if (tensor->shape != piece.global_shape) {
    fail_layout(parameter.key, "\"" + piece.key + "\" has the shape " + to_string(tensor->shape) +
                                   " in the checkpoint, and " + to_string(piece.global_shape) +
                                   " in the layout");
  }
  // The sizes of buckets do not prove that they have this rank's own layout.
  const auto is_box = [&](const StoredChunk& chunk) { return chunk.box == piece.box; };
  if (!only_own_ || std::any_of(tensor->chunks.begin(), tensor->chunks.end(), is_box)) return;
  throw Error(ErrorCode::kMismatch, "no rank of the job that saved held the model's box " +
                                        to_string(piece.box) +
                                        ", so its buckets had another layout")
      .with_key(piece.key);
}

void OptimizerStates::add_piece(const LayoutParameter& parameter, const LayoutPiece& piece,
                                std::span<const size_t> flats, const Asked* asked) {
  for (const size_t flat : flats) {
    const std::string key = key_of_state(flats_[flat].state, piece.key);
    if (asked != nullptr && !asked->keys.contains(key)) continue;
    StoredTensor& tensor = by_key_[key];
    const DType dtype = flats_[flat].dtype();
    if (tensor.chunks.empty()) {
      tensor.key = key;
      tensor.dtype = dtype;
      tensor.shape = piece.global_shape;
      tensor.order = UINT32_MAX;  // after the rest
    }
    if (tensor.dtype != dtype) {
      throw Error(ErrorCode::kMismatch, "its parts are stored as " +
                                            std::string(to_string(tensor.dtype)) + " and as " +
                                            std::string(to_string(dtype)))
          .with_key(key);
    }
    StoredChunk& chunk = tensor.chunks.emplace_back(StoredChunk{piece.box, {}});
    chunk.at.offset = places_.size();
    places_.push_back({flat, parameter.start + piece.start, piece.strides, &parameter});
  }
}

// ---- The flat tensors

// A bucket's states, as indices into flats_.
std::span<const size_t> OptimizerStates::flats_of(const OptimizerLayout& layout, BucketId id) {
  const auto [found, first] = buckets_.try_emplace({&layout, id});
  if (!first) return found->second;
  const auto group = groups_.find(layout.prefix());
  if (group == groups_.end()) {
    fail_layout(first_of(layout), "it has nothing below \"" + layout.prefix() + "\"");
  }
  if (group->second.objects.contains(kParamState)) {
    add_views(layout, id, found->second);
  } else {
    add_tensors(layout, id, found->second);
  }
  return found->second;
}

void OptimizerStates::add_tensors(const OptimizerLayout& layout, BucketId id,
                                  std::vector<size_t>& found) {
  const LayoutBucket& bucket = layout.buffers[id.first].buckets[id.second];
  const StoredGroup& group = groups_.at(layout.prefix());
  // Early versions of Megatron-Core also stored the padding at the end, but no sizes.
  const bool padded = !group.objects.contains("per_bucket_numel_unpadded");
  const std::string begin = layout.bucket_key(id.first, id.second) + ".";
  for (auto each = group.tensors.lower_bound(begin);
       each != group.tensors.end() && each->first.starts_with(begin); ++each) {
    const StoredTensor& tensor = *each->second;
    const int64_t there = tensor.shape.size() == 1 ? tensor.shape[0] : -1;
    if (there != bucket.numel && !(padded && there > bucket.numel)) {
      fail_size(bucket, 0, there, "the bucket \"" + tensor.key + "\"");
    }
    found.push_back(flats_.size());
    flats_.push_back({each->first.substr(begin.size()), &tensor, {}});
  }
  if (!found.empty() || bucket.numel == 0) return;
  fail_layout(bucket.parameters.empty() ? begin : bucket.parameters.front().key,
              "it has no bucket \"" + begin + "STATE\"");
}

// dp_zero_gather_scatter: {buffer: {dtypes: {state: a tensor of all buckets without padding}}}.
void OptimizerStates::add_views(const OptimizerLayout& layout, BucketId id,
                                std::vector<size_t>& found) {
  const StoredObject& stored = *groups_.at(layout.prefix()).objects.at(kParamState);
  const Value& object = object_of(layout, stored);
  const LayoutBuffer& buffer = layout.buffers[id.first];
  const Value* const states =
      entry_under(entry_under(&object, Value(static_cast<int64_t>(id.first))), buffer.dtypes);
  if (states == nullptr || states->kind() != Value::Kind::kDict) {
    fail_layout(first_of(layout), "\"" + stored.key + "\" has no buffer " +
                                      std::to_string(id.first) + " of " + buffer.dtype_text);
  }
  const LayoutBucket& bucket = buffer.buckets[id.second];
  int64_t before = 0;
  for (size_t j = 0; j < id.second; ++j) before += buffer.buckets[j].numel;
  for (const auto& [name, value] : states->as_dict()) {
    if (value.kind() != Value::Kind::kTensor) continue;  // "numel_unpadded"
    const TensorView& tensor = value.as_tensor();
    if (tensor.shape.size() != 1 || tensor.shape[0] != buffer.numel()) {
      fail_size(bucket, before, numel(tensor.shape),
                "state " + name.as_string() + " in \"" + stored.key + "\"");
    }
    found.push_back(flats_.size());
    flats_.push_back({name.as_string(), nullptr, tensor.narrow({{before}, {bucket.numel}})});
  }
}

const Value& OptimizerStates::object_of(const OptimizerLayout& layout, const StoredObject& stored) {
  const auto [object, first] = objects_.try_emplace(layout.prefix());
  if (!first) return object->second;
  object->second = object_(stored);
  const Value* const coalesced = entry_under(&object->second, Value("buckets_coalesced"));
  if (coalesced == nullptr || *coalesced != Value(true)) {
    throw Error(ErrorCode::kUnsupported,
                "the optimizer's object was saved by Megatron-Core before February 2024")
        .with_key(stored.key)
        .with_hint("convert it with Megatron's --ckpt-convert-update-legacy-dist-opt-format");
  }
  const auto count = static_cast<int64_t>(layout.buffers.size());
  if (entry_under(&object->second, Value(count)) != nullptr) {
    fail_layout(first_of(layout),
                "\"" + stored.key + "\" has more than " + std::to_string(count) + " buffers");
  }
  return object->second;
}

// ---- Reads

int64_t OptimizerStates::Place::element_at(const Dims& offset) const {
  int64_t element = start;
  for (size_t d = 0; d < offset.size(); ++d) element += offset[d] * strides[d];
  return element;
}

LoadPlan OptimizerStates::plan(std::span<const TensorItem> states, bool cast) const {
  try {
    return plan_load(states, by_parameter_, {.cast = cast});
  } catch (Error& error) {
    if (error.code() == ErrorCode::kCoverage)
      error.with_hint(only_own_ ? kPassLayouts : kAllLayouts);
    throw;
  }
}

StateReads OptimizerStates::reads_of(std::vector<TensorItem> wanted, bool cast) const {
  const auto other = std::stable_partition(wanted.begin(), wanted.end(), [&](const auto& item) {
    return by_parameter_.find_tensor(item.key) != nullptr ||
           stored_.find_tensor(item.key) == nullptr;
  });
  StateReads reads;
  std::move(other, wanted.end(), std::back_inserter(reads.items));
  wanted.erase(other, wanted.end());
  const LoadPlan plan = this->plan(wanted, cast);
  for (const LoadPlan::Fill& fill : plan.fills) {
    const Piece& piece = wanted[fill.item].pieces[fill.piece];
    fill_zero(narrow_to(piece.data, relative_to(fill.box, piece.box.offset)));
  }
  std::map<std::pair<size_t, DType>, size_t> items;  // indices into reads.items
  for (const ChunkRead& read : plan.reads) {
    const Piece& piece = wanted[read.item].pieces[read.piece];
    const StoredChunk& chunk = by_parameter_.tensors[read.tensor].chunks[read.chunk];
    const Place& place = this->place(chunk);
    const Flat& flat = flats_[place.flat];
    const int64_t begin = place.element_at(relative_to(read.box, chunk.box.offset).offset);
    const TensorView target = narrow_to(piece.data, relative_to(read.box, piece.box.offset));
    const Dims strides = strides_for(target, place.strides);
    if (flat.stored == nullptr) {
      put_range(target, flat.view, begin, strides);
      continue;
    }
    const auto [at, first] = items.try_emplace({place.flat, target.dtype}, reads.items.size());
    if (first) {
      TensorItem& item = reads.items.emplace_back();
      item.key = flat.stored->key;
      item.dtype = target.dtype;
      item.global_shape = flat.stored->shape;
    }
    reads.items[at->second].pieces.push_back(reads.range_for(target, begin, strides));
  }
  return reads;
}

}  // namespace tilestone::engine
