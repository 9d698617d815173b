#include "tilestone/engine/convert/convert_optimizer_internal.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/flat_states_internal.h"
#include "tilestone/engine/convert/optimizer_layout_internal.h"
#include "tilestone/state/sharded.h"

namespace tilestone::engine {
namespace {

constexpr std::string_view kGroups = "optimizer.distributed.dp_group_idx_";
constexpr std::string_view kStates = "optimizer.state.";
constexpr std::string_view kKind = "param_state_sharding_type";
constexpr std::string_view kContent = "content_metadata";
constexpr const char* kFullyReshardable = "fully_reshardable";
constexpr const char* kLayoutHint =
    "make a layout file with tilestone.megatron.distributed_optimizer.write_layouts, from the "
    "model "
    "on the meta device, and pass it with --layout";

// Skips digits; false if there are none.
bool skip_number(std::string_view& text) {
  size_t end = 0;
  while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0) ++end;
  text.remove_prefix(end);
  return end > 0;
}

// The key without "chained_N.".
std::string_view unchained(std::string_view key) {
  std::string_view rest = key;
  if (!rest.starts_with("chained_")) return key;
  rest.remove_prefix(8);
  if (!skip_number(rest) || !rest.starts_with(".")) return key;
  return rest.substr(1);
}

// A key of a model-parallel rank's optimizer: "chained_0.optimizer.distributed.dp_group_idx_1" and
// what follows its dot. nullopt: another key.
std::optional<std::pair<std::string, std::string>> group_key(std::string_view key) {
  key = grid_key(key);
  std::string_view rest = unchained(key);
  if (!rest.starts_with(kGroups)) return std::nullopt;
  rest.remove_prefix(kGroups.size());
  if (!skip_number(rest) || !rest.starts_with(".")) return std::nullopt;
  rest.remove_prefix(1);
  return std::pair(std::string(key.substr(0, key.size() - rest.size() - 1)), std::string(rest));
}

// Everything that a model-parallel rank has stored of its optimizer.
struct StoredGroup {
  std::map<std::string, const StoredTensor*> tensors;  // by the key behind the prefix
  std::map<std::string, const StoredObject*> objects;
};

// Layouts of another model, or of other ranks, are refused here.
[[noreturn]] void misfit(const std::string& parameter, const std::string& problem) {
  throw Error(ErrorCode::kMismatch, "the layout does not fit the checkpoint: " + problem)
      .with_key(parameter)
      .with_hint(
          "make the layout from the model, the parallel sizes and the bucket size of the job that "
          "saved");
}

class OptimizerConversion {
 public:
  OptimizerConversion(ConvertSource& source, std::shared_ptr<StoredSource> stored,
                      const std::string& layout_file)
      : source_(source),
        stored_(std::move(stored)),
        states_(std::make_shared<FlatStates>(stored_)) {
    find_groups();
    check_kind();
    find_layouts(layout_file);
    check_model();
    collect();
    check_values();
    replace_entries();
    replace_common();
  }

 private:
  const Metadata& metadata() const { return stored_->metadata(); }

  void find_groups() {
    for (const StoredTensor& tensor : metadata().tensors) {
      if (const auto key = group_key(tensor.key)) {
        groups_[key->first].tensors[key->second] = &tensor;
      }
    }
    for (const StoredObject& object : metadata().objects) {
      if (const auto key = group_key(object.key)) {
        groups_[key->first].objects[key->second] = &object;
      }
    }
  }

  // The format that the program has declared, in the content metadata.
  std::string declared() const {
    const Value* const content = source_.common ? source_.common->find(kContent) : nullptr;
    if (content == nullptr || content->kind() != Value::Kind::kDict) return "";
    const Value* const kind = content->find("distrib_optim_sharding_type");
    return kind == nullptr || kind->kind() != Value::Kind::kString ? "" : kind->as_string();
  }

  void check_kind() const {
    if (!groups_.empty()) return;
    const auto has = [&](std::string_view begin) {
      return std::any_of(source_.entries.begin(), source_.entries.end(), [&](const auto& entry) {
        return unchained(entry.key).starts_with(begin);
      });
    };
    if (declared() == "fsdp_dtensor" || has("optimizer.param_to_group_meta")) {
      throw Error(ErrorCode::kUnsupported,
                  "the optimizer is stored as fsdp_dtensor, the DTensors of Megatron FSDP, which "
                  "can't be converted to fully_reshardable")
          .with_hint("load it with Megatron FSDP; its DTensors reshard when they are loaded");
    }
    if (has(kStates)) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "the optimizer's states are already stored by parameter, and load into any layout")
          .with_hint("leave out the options --optimizer and --layout");
    }
    throw Error(ErrorCode::kNotFound,
                "the checkpoint does not hold the state of a distributed optimizer in "
                "dp_reshardable or dp_zero_gather_scatter");
  }

  void find_layouts(const std::string& file) {
    std::vector<OptimizerLayout> layouts;
    if (!file.empty()) {
      layouts = read_optimizer_layouts(file);
    } else {
      for (const auto& [prefix, group] : groups_) {
        const auto object = group.objects.find("layout");
        if (object == group.objects.end()) continue;
        layouts.push_back(optimizer_layout_of(stored_->object(*object->second)));
      }
    }
    if (layouts.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the optimizer is stored in buckets, which say nothing about the model, and the "
                  "checkpoint does not hold their layout")
          .with_key(groups_.begin()->first)
          .with_hint(kLayoutHint);
    }
    for (OptimizerLayout& layout : layouts) {
      const std::string prefix = layout.prefix();
      if (!layouts_.emplace(prefix, std::move(layout)).second) {
        throw Error(ErrorCode::kMismatch, "two layouts were given for " + prefix);
      }
    }
    for (const auto& [prefix, group] : groups_) {
      if (layouts_.contains(prefix)) continue;
      throw Error(ErrorCode::kMismatch, "no layout describes the buckets of this rank")
          .with_key(prefix)
          .with_hint(kLayoutHint);
    }
  }

  template <typename Call>  // void(const OptimizerLayout&, const LayoutParameter&, const Piece&)
  void each_piece(Call call) const {
    for (const auto& [prefix, layout] : layouts_) {
      for (const LayoutBuffer& buffer : layout.buffers) {
        for (const LayoutBucket& bucket : buffer.buckets) {
          for (const LayoutParameter& parameter : bucket.parameters) {
            for (const LayoutPiece& piece : parameter.pieces) call(parameter, piece);
          }
        }
      }
    }
  }

  // Compares the layouts with the model's tensors, unless the checkpoint has no model.
  void check_model() const {
    const bool has_model = std::any_of(metadata().tensors.begin(), metadata().tensors.end(),
                                       [](const auto& tensor) { return !group_key(tensor.key); });
    if (!has_model) return;
    each_piece([&](const LayoutParameter& parameter, const LayoutPiece& piece) {
      const StoredTensor* const tensor = metadata().find_tensor(piece.key);
      if (tensor == nullptr) {
        misfit(parameter.key, "its model has no tensor \"" + piece.key + "\"");
      }
      if (tensor->shape != piece.global_shape) {
        misfit(parameter.key, "\"" + piece.key + "\" has the shape " + to_string(tensor->shape) +
                                  " in the checkpoint, and " + to_string(piece.global_shape) +
                                  " in the layout");
      }
    });
  }

  // ---- The buckets

  void collect() {
    for (const auto& [prefix, layout] : layouts_) {
      const auto group = groups_.find(prefix);
      if (group == groups_.end()) {
        misfit(first_of(layout), "it has nothing below \"" + prefix + "\"");
      }
      const auto object = group->second.objects.find("param_state");
      if (object != group->second.objects.end()) {
        collect_object(layout, *object->second);
      } else {
        collect_buckets(layout, group->second);
      }
    }
    for (auto& [key, tensor] : tensors_) indices_[key] = states_->add_tensor(std::move(tensor));
  }

  static std::string first_of(const OptimizerLayout& layout) {
    for (const LayoutBuffer& buffer : layout.buffers) {
      for (const LayoutBucket& bucket : buffer.buckets) {
        if (!bucket.parameters.empty()) return bucket.parameters.front().key;
      }
    }
    return layout.prefix();
  }

  // The states of one stored bucket by name. `key`: of the bucket, behind the prefix.
  std::map<std::string, const StoredTensor*> bucket_states(const StoredGroup& group,
                                                           const std::string& key) const {
    std::map<std::string, const StoredTensor*> found;
    for (auto each = group.tensors.lower_bound(key + ".");
         each != group.tensors.end() && each->first.starts_with(key + "."); ++each) {
      found.emplace(each->first.substr(key.size() + 1), each->second);
    }
    return found;
  }

  void collect_buckets(const OptimizerLayout& layout, const StoredGroup& group) {
    // Early versions of Megatron-Core also stored the padding at the end, but no sizes.
    const bool padded = !group.objects.contains("per_bucket_numel_unpadded");
    size_t used = 0;
    for (size_t i = 0; i < layout.buffers.size(); ++i) {
      for (size_t j = 0; j < layout.buffers[i].buckets.size(); ++j) {
        const LayoutBucket& bucket = layout.buffers[i].buckets[j];
        const std::string key = layout.bucket_key(i, j);
        const auto states = bucket_states(group, key.substr(layout.prefix().size() + 1));
        if (states.empty() && bucket.numel > 0) {
          misfit(bucket.parameters.empty() ? key : bucket.parameters.front().key,
                 "it has no bucket \"" + key + "\"");
        }
        for (const auto& [state, tensor] : states) {
          check_size(bucket, *tensor, padded);
          add(bucket, 0, state, states_->add_stored(*tensor));
          ++used;
        }
      }
    }
    for (const auto& [key, tensor] : group.tensors) {
      if (used == group.tensors.size()) break;
      if (!known(layout, tensor->key)) {
        misfit(last_of(layout),
               "it has the bucket \"" + tensor->key + "\", in which the layout has no parameter");
      }
    }
  }

  static bool known(const OptimizerLayout& layout, std::string_view key) {
    for (size_t i = 0; i < layout.buffers.size(); ++i) {
      for (size_t j = 0; j < layout.buffers[i].buckets.size(); ++j) {
        if (key.starts_with(layout.bucket_key(i, j) + ".")) return true;
      }
    }
    return false;
  }

  static std::string last_of(const OptimizerLayout& layout) {
    for (auto buffer = layout.buffers.rbegin(); buffer != layout.buffers.rend(); ++buffer) {
      for (auto bucket = buffer->buckets.rbegin(); bucket != buffer->buckets.rend(); ++bucket) {
        if (!bucket->parameters.empty()) return bucket->parameters.back().key;
      }
    }
    return layout.prefix();
  }

  void check_size(const LayoutBucket& bucket, const StoredTensor& tensor, bool padded) const {
    const int64_t there = tensor.shape.size() == 1 ? tensor.shape[0] : -1;
    if (there == bucket.numel || (padded && there > bucket.numel)) return;
    check_numel(bucket, 0, there, "the bucket \"" + tensor.key + "\"");
  }

  // Throws: a flat tensor of `there` elements is stored instead of `bucket.numel`, which begin at
  // `before`.
  [[noreturn]] static void check_numel(const LayoutBucket& bucket, int64_t before, int64_t there,
                                       const std::string& what) {
    std::string name = bucket.parameters.empty() ? what : bucket.parameters.back().key;
    for (const LayoutParameter& parameter : bucket.parameters) {
      if (before + parameter.end() <= there) continue;
      name = parameter.key;
      break;
    }
    misfit(name, what + " is stored with " + std::to_string(there) + " elements, but has " +
                     std::to_string(before + bucket.numel) + " in the layout");
  }

  // Adds the parameters of a bucket that begins at element `before` of a flat tensor.
  void add(const LayoutBucket& bucket, int64_t before, const std::string& state, size_t flat) {
    for (const LayoutParameter& parameter : bucket.parameters) {
      for (const LayoutPiece& piece : parameter.pieces) {
        const std::string key = std::string(kStates) + state + "." + piece.key;
        ScatteredTensor& tensor = tensors_[key];
        if (tensor.key.empty()) tensor = {key, {}, piece.global_shape, {}};
        if (tensor.shape != piece.global_shape) {
          misfit(parameter.key, "two layouts give \"" + piece.key + "\" the shapes " +
                                    to_string(tensor.shape) + " and " +
                                    to_string(piece.global_shape));
        }
        const int64_t start = before + parameter.start + piece.start;
        tensor.parts.push_back({piece.box, flat, start, piece.strides});
        if (state == "param") samples_.push_back({&parameter, &piece, flat, start});
      }
    }
  }

  // dp_zero_gather_scatter: {buffer: {dtypes: {state: a tensor of all buckets without padding}}}.
  void collect_object(const OptimizerLayout& layout, const StoredObject& stored) {
    const Value object = stored_->object_in_place(stored);
    const Value* const coalesced =
        object.kind() == Value::Kind::kDict ? object.find("buckets_coalesced") : nullptr;
    if (coalesced == nullptr || *coalesced != Value(true)) {
      throw Error(ErrorCode::kUnsupported,
                  "the optimizer's object was saved by Megatron-Core before February 2024")
          .with_key(stored.key)
          .with_hint("convert it with Megatron's --ckpt-convert-update-legacy-dist-opt-format");
    }
    for (size_t i = 0; i < layout.buffers.size(); ++i) {
      const LayoutBuffer& buffer = layout.buffers[i];
      const Value* const states =
          entry(entry(&object, Value(static_cast<int64_t>(i))), buffer.dtypes);
      if (states == nullptr || states->kind() != Value::Kind::kDict) {
        misfit(first_of(layout), "\"" + stored.key + "\" has no buffer " + std::to_string(i) +
                                     " of " + buffer.dtype_text);
      }
      for (const auto& [name, tensor] : states->as_dict()) {
        if (tensor.kind() != Value::Kind::kTensor) continue;  // "numel_unpadded"
        add_buffer(buffer, stored, name.as_string(), tensor.as_tensor());
      }
    }
    const int64_t count = static_cast<int64_t>(layout.buffers.size());
    if (entry(&object, Value(count)) != nullptr) {
      misfit(last_of(layout),
             "\"" + stored.key + "\" has more than " + std::to_string(count) + " buffers");
    }
  }

  static const Value* entry(const Value* dict, const Value& key) {
    if (dict == nullptr || dict->kind() != Value::Kind::kDict) return nullptr;
    for (const auto& [name, value] : dict->as_dict()) {
      if (name == key) return &value;
    }
    return nullptr;
  }

  void add_buffer(const LayoutBuffer& buffer, const StoredObject& stored, const std::string& state,
                  const TensorView& tensor) {
    const int64_t there = numel(tensor.shape);
    const size_t flat = states_->add_view(tensor);
    int64_t before = 0;
    for (const LayoutBucket& bucket : buffer.buckets) {
      const bool last = &bucket == &buffer.buckets.back();
      if (tensor.shape.size() != 1 || before + bucket.numel > there ||
          (last && before + bucket.numel != there)) {
        check_numel(bucket, before, there, "state " + state + " in \"" + stored.key + "\"");
      }
      add(bucket, before, state, flat);
      before += bucket.numel;
    }
  }

  // ---- The values

  struct Sample {
    const LayoutParameter* parameter;
    const LayoutPiece* piece;
    size_t flat;    // the state "param"
    int64_t start;  // of the piece in it
  };

  // Compares the optimizer's parameters with the model's, up to 256 elements of each piece. A
  // layout that has the sizes of the right one, but not its order, is found in this way.
  void check_values() {
    constexpr size_t kBatch = 1000;
    for (size_t begin = 0; begin < samples_.size(); begin += kBatch) {
      check_values(std::span(samples_).subspan(begin, std::min(kBatch, samples_.size() - begin)));
    }
  }

  void check_values(std::span<const Sample> samples) {
    constexpr int64_t kElements = 256;
    constexpr int64_t kReach = 1 << 16;  // in the bucket
    std::vector<FlatStates::Read> reads;
    std::vector<TensorItem> wanted;
    std::vector<std::pair<const Sample*, int64_t>> compared;  // and the stride
    for (const Sample& sample : samples) {
      const LayoutPiece& piece = *sample.piece;
      const StoredTensor* const model = metadata().find_tensor(piece.key);
      const bool is_real =
          model != nullptr && (model->dtype == DType::kFloat32 ||
                               model->dtype == DType::kBFloat16 || model->dtype == DType::kFloat16);
      if (!is_real || piece.box.empty()) continue;
      const size_t rank = piece.box.rank();
      const int64_t stride = rank == 0 ? 1 : std::max<int64_t>(piece.strides[rank - 1], 1);
      const int64_t count =
          rank == 0 ? 1 : std::min({piece.box.shape.back(), kElements, kReach / stride + 1});
      Box box{piece.box.offset, Dims()};
      for (size_t i = 0; i < rank; ++i) box.shape.push_back(i + 1 == rank ? count : 1);
      TensorItem item;
      item.key = piece.key;
      item.dtype = DType::kFloat32;
      item.global_shape = model->shape;
      item.pieces.push_back({box, TensorView::allocate(DType::kFloat32, box.shape)});
      wanted.push_back(std::move(item));
      reads.push_back({sample.flat, sample.start,
                       TensorView::allocate(DType::kFloat32, Dims{(count - 1) * stride + 1})});
      compared.emplace_back(&sample, stride);
    }
    states_->read(reads);
    stored_->read(wanted, true);
    for (size_t i = 0; i < compared.size(); ++i) {
      compare(*compared[i].first, wanted[i].pieces[0].data, reads[i].into, compared[i].second);
    }
  }

  // The main parameters are more precise than the model's, which may be of 8 bits. So only large
  // differences of most elements count.
  static void compare(const Sample& sample, const TensorView& model, const TensorView& state,
                      int64_t stride) {
    const auto* const ours = reinterpret_cast<const float*>(state.data);
    const auto* const theirs = reinterpret_cast<const float*>(model.data);
    const int64_t count = numel(model.shape);
    int64_t differing = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float a = ours[i * stride], b = theirs[i];
      const bool close = std::abs(a - b) <= 0.3F * std::max(std::abs(a), std::abs(b)) + 1e-6F;
      differing += close || std::isnan(b) ? 0 : 1;
    }
    if (2 * differing <= count) return;
    misfit(sample.parameter->key,
           "where the layout has this parameter, the optimizer's parameters are not the model's: " +
               std::to_string(differing) + " of " + std::to_string(count) +
               " compared elements of \"" + sample.piece->key + "\" differ");
  }

  // ---- What is written

  void replace_entries() {
    std::erase_if(source_.entries,
                  [](const SourceEntry& entry) { return group_key(entry.key).has_value(); });
    for (const auto& [key, index] : indices_) {
      const ScatteredTensor& tensor = states_->scattered(index);
      source_.entries.push_back({.key = key,
                                 .path = {},
                                 .dtype = tensor.dtype,
                                 .shape = tensor.shape,
                                 .tensor = [states = states_, i = index](
                                               DType dtype) { return states->tensor(i, dtype); },
                                 .object = nullptr,
                                 .order = UINT32_MAX});  // after the rest
    }
    std::stable_sort(source_.entries.begin(), source_.entries.end(),
                     [](const SourceEntry& a, const SourceEntry& b) {
                       const bool a_object = a.tensor == nullptr, b_object = b.tensor == nullptr;
                       return a_object != b_object ? b_object : a.key < b.key;
                     });
  }

  // What an optimizer of the chain has beside its states: the objects of its first rank.
  Value common_of(const StoredGroup& group) const {
    static const std::set<std::string, std::less<>> kOfBuckets = {
        "param_state", "per_bucket_numel", "per_bucket_numel_unpadded", "layout"};
    Value::Dict found;
    for (const auto& [name, object] : group.objects) {
      if (!kOfBuckets.contains(name)) found.emplace_back(name, stored_->object(*object));
    }
    found.emplace_back(std::string(kKind), kFullyReshardable);
    return Value::dict(std::move(found));
  }

  void replace_common() {
    Value::Dict chain;
    std::optional<Value> only;
    std::set<std::optional<int64_t>> done;
    std::map<std::pair<int64_t, int64_t>, std::string> order;  // by chain and group
    for (const auto& [prefix, layout] : layouts_) {
      order[{layout.chain.value_or(-1), layout.group}] = prefix;
    }
    for (const auto& [place, prefix] : order) {
      const auto& number = layouts_.at(prefix).chain;
      if (!done.insert(number).second) continue;
      if (number) {
        chain.emplace_back(*number, common_of(groups_.at(prefix)));
      } else {
        only = common_of(groups_.at(prefix));
      }
    }
    Value state = only ? *only : Value::dict(std::move(chain));
    Value::Dict common = source_.common ? source_.common->as_dict() : Value::Dict();
    const std::string place = place_in(common);
    set(common, place, std::move(state));
    Value::Dict content;
    if (const Value* const found = entry_of(common, kContent)) {
      if (found->kind() == Value::Kind::kDict) content = found->as_dict();
    }
    set(content, "distrib_optim_sharding_type", kFullyReshardable);
    set(content, "chained_optim_avoid_prefix", true);
    set(common, std::string(kContent), Value::dict(std::move(content)));
    source_.common = Value::dict(std::move(common));
  }

  static const Value* entry_of(const Value::Dict& dict, std::string_view name) {
    for (const auto& [key, value] : dict) {
      if (key.kind() == Value::Kind::kString && key.as_string() == name) return &value;
    }
    return nullptr;
  }

  static void set(Value::Dict& dict, const std::string& name, Value value) {
    for (auto& [key, old] : dict) {
      if (key.kind() != Value::Kind::kString || key.as_string() != name) continue;
      old = std::move(value);
      return;
    }
    dict.emplace_back(name, std::move(value));
  }

  // The name under which the program has the optimizer in its state.
  static std::string place_in(const Value::Dict& common) {
    const auto has_kind = [](const Value& value) {
      return value.kind() == Value::Kind::kDict && value.find(kKind) != nullptr;
    };
    for (const auto& [key, value] : common) {
      if (key.kind() != Value::Kind::kString || value.kind() != Value::Kind::kDict) continue;
      const auto& inner = value.as_dict();
      if (has_kind(value) || std::any_of(inner.begin(), inner.end(),
                                         [&](const auto& each) { return has_kind(each.second); })) {
        return key.as_string();
      }
    }
    return "optimizer";
  }

  ConvertSource& source_;
  const std::shared_ptr<StoredSource> stored_;
  const std::shared_ptr<FlatStates> states_;
  std::map<std::string, StoredGroup> groups_;       // by prefix
  std::map<std::string, OptimizerLayout> layouts_;  // by prefix
  std::map<std::string, ScatteredTensor> tensors_;  // by the new key
  std::map<std::string, size_t> indices_;           // in states_, by the new key
  std::vector<Sample> samples_;
};

}  // namespace

void make_fully_reshardable(ConvertSource& source, const std::shared_ptr<StoredSource>& stored,
                            const std::string& layout_file) {
  OptimizerConversion(source, stored, layout_file);
}

}  // namespace tilestone::engine
