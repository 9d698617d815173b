#include "tilestone/engine/save/share_internal.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <string_view>
#include <unordered_map>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/write/stage_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/state/content_hash.h"

namespace tilestone::engine {

namespace {

void note_content(const ObjectItem& item, const Format& format, PlanObject& object) {
  if (object.content != 0) return;
  const Value& value = item.value;
  if (value.kind() != Value::Kind::kPickled) {
    object.content = content_hash(value);
    return;
  }
  // Each process pickles a set in another order, so its elements are compared, not the bytes.
  const Pickled& pickled = value.as_pickled();
  try {
    object.content = content_hash(pickled.archive ? format.parse_object(pickled.bytes)
                                                  : read_pickle(pickled.bytes));
  } catch (const Error&) {
    object.content = content_hash(value);  // a pickle that only Python can read
  }
}

// Tensors on devices whose hashes are wanted: small ones are fetched together.
class FetchedHashes {
 public:
  explicit FetchedHashes(LocalSavePlan& plan) : plan_(plan) {}

  void add(uint32_t chunk, const TensorView& tensor) {
    const uint64_t size = tensor.bytes();
    if (tensor.device == nullptr || size > kMaxComparedBytes) {
      plan_.chunks[chunk].content = elements_hash(tensor);
      return;
    }
    if (size_ + size > kMost) fetch();
    waiting_.push_back({chunk, &tensor, size_});
    size_ += size;
  }

  void fetch() {
    Bytes memory(size_);
    std::vector<DeviceCopy> copies;
    for (const Waiting& one : waiting_) {
      copies.push_back(
          one.tensor->device_copy(MutableByteView(memory).subspan(one.begin, one.tensor->bytes())));
    }
    copy_now(CopyTo::kHost, copies);
    for (const Waiting& one : waiting_) {
      plan_.chunks[one.chunk].content = elements_hash(
          TensorView::contiguous(memory.data() + one.begin, one.tensor->dtype, one.tensor->shape));
    }
    waiting_.clear();
    size_ = 0;
  }

 private:
  static constexpr uint64_t kMost = 32u << 20;  // bytes to fetch at once
  struct Waiting {
    uint32_t chunk = 0;
    const TensorView* tensor = nullptr;
    uint64_t begin = 0;  // in the fetched bytes
  };
  LocalSavePlan& plan_;
  std::vector<Waiting> waiting_;
  uint64_t size_ = 0;
};

// Hashes the chunks for which `wanted(index)` is true and whose hash is not known.
template <typename Wanted>
void hash_chunks(SaveShare& share, const Wanted& wanted) {
  FetchedHashes hashes(share.local);
  uint32_t i = 0;
  for (const TensorItem& item : share.items.tensors) {
    for (const Piece& piece : item.pieces) {
      const uint32_t chunk = i++;
      if (share.local.chunks.at(chunk).content != 0 || piece.box.empty() || !wanted(chunk))
        continue;
      with_key(item.key, [&] { hashes.add(chunk, piece.data); });
    }
  }
  hashes.fetch();
}

void drop_empty_chunks(SaveShare& share) {
  std::erase_if(share.assignment.chunks,
                [&](uint32_t i) { return share.local.chunks[i].box.empty(); });
}

// Refuses keys for which the format needs a path that is longer than the system allows.
class PathLimit {
 public:
  PathLimit(const SaveShare& share, const Storage& location)
      : format_(*share.format), location_(location), most_(location.facts().max_name_bytes) {
    // The save may write into a directory beside the location.
    if (share.format->needs_grid()) most_ -= std::min<uint64_t>(most_, kSiblingLonger);
  }

  template <typename Item>
  void check(const Item& item) const {
    const size_t needed = format_.longest_name(item);
    if (needed <= most_) return;
    throw Error(ErrorCode::kInvalidArgument,
                "the key's file needs a path that is too long: " + std::to_string(needed) +
                    " bytes in " + location_.describe() + ", where a save in the format " +
                    std::string(format_.name()) + " can use " + std::to_string(most_))
        .with_key(item.key)
        .with_hint("use shorter keys or a shorter location, or save in the torch_dist format");
  }

 private:
  const Format& format_;
  const Storage& location_;
  uint64_t most_;
};

}  // namespace

uint64_t SaveShare::bytes() const {
  uint64_t bytes = 0;
  for (const uint32_t i : written_chunks(assignment)) {
    const PlanChunk& chunk = local.chunks[i];
    bytes += static_cast<uint64_t>(chunk.box.numel()) * itemsize(local.tensors[chunk.tensor].dtype);
  }
  return bytes;
}

void set_options(SaveShare& share, const SaveOptions& options) {
  share.options = options;
  share.format = format_of(options);
  share.dialect = dialect_of(options);
}

Items items_of(const StateDict& state, const SaveShare& share) {
  if (is_plain(state)) return share.dialect->to_items(state, *share.format);
  return share.dialect->to_items(drop_nonpersistent(build_factories(state)), *share.format);
}

void check_items(const SaveShare& share, const Storage& location) {
  const Items& items = share.items;
  share.format->check(items);
  const PathLimit limit(share, location);
  for (const TensorItem& item : items.tensors) limit.check(item);
  for (const ObjectItem& item : items.objects) limit.check(item);
  std::set<std::string_view> keys;
  if (!share.options.tensor_attributes.empty()) {
    for (const TensorItem& item : items.tensors) keys.insert(item.key);
  }
  for (const auto& [key, attributes] : share.options.tensor_attributes) {
    if (keys.contains(key)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "tensor_attributes names a tensor that this rank does not save")
        .with_key(key)
        .with_hint("use the tensor's key in the checkpoint");
  }
  for (const TensorItem& item : items.tensors) {
    for (const Piece& piece : item.pieces) {
      if (piece.data.has_data()) continue;
      throw Error(ErrorCode::kInvalidArgument, "a tensor without data can't be saved")
          .with_key(item.key);
    }
  }
}

ReplicaNames replicas_to_name(const SaveShare& share) {
  if (!share.options.tp_replica_names) return {};
  if (share.dialect->has_replica_names() && !share.format->has_fixed_names()) {
    return replicas_among(share.items);
  }
  throw Error(
      ErrorCode::kUnsupported,
      "tp_replica_names needs Megatron-Core's dialect and the format torch_dist, but this save "
      "has the format " +
          std::string(share.format->name()) + " and the dialect " +
          std::string(share.dialect->name()))
      .with_hint(Hint{{"save with ", "tp_replica_names", "false"}});
}

void set_state(SaveShare& share, const StateDict& state) {
  if (is_plain(state)) {
    share.lists = list_lengths(state);
    share.items = share.dialect->to_items(state, *share.format);
    return;
  }
  const StateDict built = build_factories(state);
  share.lists = list_lengths(built);
  share.items = share.dialect->to_items(drop_nonpersistent(built), *share.format);
}

void note_contents(SaveShare& share, bool without_common, const ContentGroups& groups) {
  const std::vector<ObjectItem>& objects = share.items.objects;
  const std::string_view left_out = without_common ? share.dialect->common_object() : "";
  for (size_t i = 0; i < objects.size(); ++i) {
    if (without_common && objects[i].key == left_out) continue;
    note_content(objects[i], *share.format, share.local.objects[i]);
  }
  if (share.world_size == 1) return;
  hash_chunks(share, [&](uint32_t i) {
    const bool asked = i < groups.chunks.size() && groups.chunks[i] != 0;
    return asked || is_compared(share.local, share.local.chunks[i]);
  });
}

void note_chunks(SaveShare& share, const std::vector<uint32_t>& chunks) {
  if (chunks.empty()) return;
  const std::set<uint32_t> wanted(chunks.begin(), chunks.end());
  hash_chunks(share, [&](uint32_t i) { return wanted.contains(i); });
}

std::vector<int> replicate_group_of(const SaveShare& share) {
  const SaveOptions& options = share.options;
  if (!options.copies) return {};
  if (share.format->needs_grid()) {
    throw Error(ErrorCode::kUnsupported,
                "the format " + std::string(share.format->name()) +
                    " stores each chunk in its own file, so a rank has no data file for copies")
        .with_hint("save without copies");
  }
  if (options.copies->group.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "copies.group is empty: it says which ranks' tensors are copied")
        .with_rank(share.rank)
        .with_hint("list the ranks whose tensors this rank copies, including this rank");
  }
  return checked_group(share.rank, share.world_size, options.copies->group);
}

void note_contents_of_copied(SaveShare& share) {
  const std::vector<ObjectItem>& objects = share.items.objects;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (objects[i].key == share.dialect->common_object()) continue;
    note_content(objects[i], *share.format, share.local.objects[i]);
  }
}

void limit_and_count_copies(SaveShare& share, SaveResult& result) {
  const Assignment& mine = share.assignment;
  const auto encoder = share.format->encoder();
  for (const uint32_t i : mine.object_copies) {
    share.local.objects.at(i).bytes = encoder->object(share.items.objects.at(i), 0).length;
  }
  constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();
  const auto& copies = share.options.copies;
  const uint64_t most = copies ? copies->max_bytes.value_or(kNoLimit) : kNoLimit;
  result.copy_bytes = limit_copies(share.local, most, share.assignment);
  result.copies = mine.copies.size() + mine.object_copies.size();
}

Assignment plan_by_rule(const SaveShare& share) {
  const std::vector<int> group = replicate_group_of(share);
  const bool all = group.size() == static_cast<size_t>(share.world_size);
  return plan_save_by_rule(share.local, share.rank, group, all);
}

Assignment all_that_is_held(const LocalSavePlan& plan) {
  Assignment all;
  for (uint32_t i = 0; i < plan.chunks.size(); ++i) {
    const PlanChunk& chunk = plan.chunks[i];
    const bool empty_tensor = numel(plan.tensors[chunk.tensor].global_shape) == 0;
    if (empty_tensor || !chunk.box.empty()) all.chunks.push_back(i);
  }
  all.objects.resize(plan.objects.size());
  std::iota(all.objects.begin(), all.objects.end(), 0u);
  return all;
}

// Several items have the same key if the tensor has several shards on this rank.
void set_grids(SaveShare& share, const std::vector<Dims>& grids) {
  if (grids.size() != share.local.tensors.size()) {
    throw Error(ErrorCode::kInternal,
                "the coordinator's grids are not those of the local plan's tensors");
  }
  std::unordered_map<std::string_view, const Dims*> cells;
  for (size_t i = 0; i < grids.size(); ++i) cells.emplace(share.local.tensors[i].key, &grids[i]);
  for (TensorItem& item : share.items.tensors) {
    if (const auto cell = cells.find(item.key); cell != cells.end()) {
      item.chunk_shape = *cell->second;
    }
  }
  drop_empty_chunks(share);
}

}  // namespace tilestone::engine
