#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/geometry/coverage.h"
#include "tilestone/plan/plan_sink_internal.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone {
namespace {

class LocalPlanner {
 public:
  LocalSavePlan plan(const Items& items) {
    tensors_.reserve(items.tensors.size());
    plan_.tensors.reserve(items.tensors.size());
    plan_.chunks.reserve(items.tensors.size());
    for (const TensorItem& item : items.tensors) add(item);
    for (const ObjectItem& item : items.objects) add(item);
    check_overlaps();
    return std::move(plan_);
  }

 private:
  void add(const TensorItem& item) {
    const uint32_t tensor = tensor_of(item);
    const uint32_t holders = item.holders.empty() ? PlanChunk::kUnknown : set_of(item.holders);
    const bool main = is_main_replica(item.replica_id);
    const bool near_main = !main && item.replica_id.size() == 3 && item.replica_id[2] == 0;
    for (const Piece& piece : item.pieces) {
      with_key(item.key, [&] {
        check_bounds(piece.box, item.global_shape);
        checked_mul(static_cast<uint64_t>(piece.box.numel()), itemsize(item.dtype),
                    "bytes of the box");
      });
      plan_.chunks.push_back(
          {tensor, holders, main, piece.box, item.common, item.unknown_replicas, 0, near_main});
      if (!piece.box.empty()) ++boxes_[tensor];
    }
  }

  void add(const ObjectItem& item) {
    if (tensors_.contains(item.key)) {
      throw Error(ErrorCode::kInvalidArgument, "the key is used for a tensor and for an object")
          .with_key(item.key);
    }
    if (!objects_.emplace(item.key, 0).second) {
      throw Error(ErrorCode::kInvalidArgument, "two objects have the same key").with_key(item.key);
    }
    plan_.objects.push_back({item.key, item.common, is_main_replica(item.replica_id)});
  }

  uint32_t tensor_of(const TensorItem& item) {
    const auto next = static_cast<uint32_t>(plan_.tensors.size());
    const auto [known, is_new] = tensors_.emplace(item.key, next);
    if (is_new) {
      plan_.tensors.push_back({item.key, item.dtype, item.global_shape});
      boxes_.push_back(0);
      return next;
    }
    const PlanTensor& tensor = plan_.tensors[known->second];
    if (tensor.dtype != item.dtype || tensor.global_shape != item.global_shape) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the key is used for two tensors, " + std::string(to_string(tensor.dtype)) + " " +
                      to_string(tensor.global_shape) + " and " +
                      std::string(to_string(item.dtype)) + " " + to_string(item.global_shape))
          .with_key(item.key);
    }
    return known->second;
  }

  uint32_t set_of(const std::vector<int>& holders) {
    const auto next = static_cast<uint32_t>(plan_.holder_sets.size());
    const auto [known, is_new] = sets_.emplace(holders, next);
    if (is_new) plan_.holder_sets.push_back(holders);
    return known->second;
  }

  void check_overlaps() const {
    std::map<uint32_t, std::vector<Box>> several;  // boxes of tensors with more than one
    for (const PlanChunk& chunk : plan_.chunks) {
      if (boxes_[chunk.tensor] < 2 || chunk.box.empty()) continue;
      several[chunk.tensor].push_back(chunk.box);
    }
    for (const auto& [tensor, boxes] : several) check_overlap(plan_.tensors[tensor], boxes);
  }

  static void check_overlap(const PlanTensor& tensor, const std::vector<Box>& boxes) {
    if (const auto pair = find_overlap(boxes)) {
      throw Error(ErrorCode::kInvalidArgument, "this rank holds overlapping boxes " +
                                                   to_string(boxes[pair->first]) + " and " +
                                                   to_string(boxes[pair->second]))
          .with_key(tensor.key);
    }
  }

  LocalSavePlan plan_;
  std::vector<uint32_t> boxes_;  // by tensor: number of boxes with elements
  std::unordered_map<std::string_view, uint32_t> tensors_;
  std::unordered_map<std::string_view, uint32_t> objects_;
  std::map<std::vector<int>, uint32_t> sets_;
};

// ---- Encoding ----

constexpr uint8_t kPlanVersion = 6;
constexpr uint8_t kAssignmentVersion = 3;

// Writes ascending ranks as runs with equal steps: (gap to the run's first rank, step, count).
void write_ranks(ByteWriter& out, const std::vector<int>& ranks) {
  out.varint(ranks.size());
  int last = 0;
  for (size_t i = 0; i < ranks.size();) {
    const int step = i + 1 < ranks.size() ? ranks[i + 1] - ranks[i] : 1;
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
    out.varint(static_cast<uint64_t>(ranks[i] - last));
    out.varint(static_cast<uint64_t>(step));
    out.varint(end - i);
    last = ranks[end - 1];
    i = end;
  }
}

// Runs expand when they are read. The largest possible number of ranks in a job bounds this.
constexpr uint64_t kMaxRanks = 1 << 24;

std::vector<int> read_ranks(ByteReader& in, uint64_t& budget) {
  const uint64_t count = in.varint();
  if (count == 0 || count > budget) in.fail("a set of holders has an impossible size");
  budget -= count;
  std::vector<int> ranks;
  int64_t next = 0;
  int gap = 0, step = 0;
  while (ranks.size() < count) {
    both::varint(in, gap);
    both::varint(in, step);
    next += gap;
    const uint64_t run = in.varint();
    if (run == 0 || run > count - ranks.size()) in.fail("a run of ranks has an impossible length");
    for (uint64_t i = 0; i < run; ++i, next += step) {
      if (next > static_cast<int64_t>(kMaxRanks)) in.fail("a rank is out of range");
      if (!ranks.empty() && next <= ranks.back()) in.fail("holders are not ascending");
      ranks.push_back(static_cast<int>(next));
    }
    next -= step;
  }
  return ranks;
}

void walk_tensors(auto& io, auto& tensors) {
  wire::Keys keys;
  both::each(io, tensors, 4, [&](auto& tensor) {
    keys.walk(io, tensor.key);
    wire::dtype(io, tensor.dtype);
    wire::shape(io, tensor.global_shape);
  });
}

void walk_ascending(ByteWriter& out, const std::vector<uint32_t>& indices) {
  out.varint(indices.size());
  uint32_t last = 0;
  for (uint32_t index : indices) {
    out.varint(index - last);
    last = index;
  }
}

void walk_ascending(ByteReader& in, std::vector<uint32_t>& indices) {
  uint64_t last = 0;
  both::each(in, indices, 1, [&](uint32_t& index) {
    const uint64_t step = in.varint();
    if (step > ~uint32_t{0} - last) in.fail("an index is out of range");
    if (step == 0 && &index != indices.data()) in.fail("indices are not ascending");
    last += step;
    index = static_cast<uint32_t>(last);
  });
}

void walk_assignment(auto& io, auto& assignment) {
  walk_ascending(io, assignment.chunks);
  walk_ascending(io, assignment.objects);
  walk_ascending(io, assignment.copies);
  walk_ascending(io, assignment.object_copies);
}

}  // namespace

LocalSavePlan make_local_plan(const Items& items) { return LocalPlanner().plan(items); }

Bytes LocalSavePlan::encode() const {
  ByteWriter out;
  out.reserve(32 * (tensors.size() + chunks.size() + objects.size()));
  out.u8(kPlanVersion);
  ByteWriter table;
  table.reserve(16 * tensors.size());
  walk_tensors(table, tensors);
  out.blob(table.bytes());
  out.varint(holder_sets.size());
  for (const auto& set : holder_sets) write_ranks(out, set);
  out.varint(chunks.size());
  for (const PlanChunk& chunk : chunks) {
    out.varint(chunk.tensor);
    const uint64_t holders = chunk.holders == PlanChunk::kUnknown ? 0 : chunk.holders + 1;
    out.varint(holders * 16 + (chunk.content != 0 ? 8 : 0) + (chunk.unknown_replicas ? 4 : 0) +
               (chunk.common ? 2 : 0) + (chunk.main_replica ? 1 : 0));
    wire::box(out, tensors[chunk.tensor].global_shape, chunk.box);
    if (chunk.content != 0) out.u64(chunk.content);
  }
  out.varint(objects.size());
  wire::Keys keys;
  for (const PlanObject& object : objects) {
    keys.walk(out, object.key);
    out.u8(static_cast<uint8_t>((object.content != 0 ? 4 : 0) | (object.common ? 2 : 0) |
                                (object.main_replica ? 1 : 0)));
    if (object.content != 0) out.u64(object.content);
  }
  return std::move(out).take();
}

void PlanDecoder::decode(ByteView bytes, PlanSink& sink) {
  ByteReader in(bytes, "local save plan");
  if (in.u8() != kPlanVersion) in.fail("the version is unknown");
  const ByteView table = in.blob();
  const bool same = decoded_ && table.size() == encoded_table_.size() &&
                    std::memcmp(table.data(), encoded_table_.data(), table.size()) == 0;
  decoded_ = false;
  if (!same) decode_table(table);
  sink.tensor_table(table_, same);
  decode_parts(in, sink);
  decoded_ = true;
}

void PlanDecoder::decode_table(ByteView encoded) {
  ByteReader in(encoded, "local save plan's tensors");
  walk_tensors(in, table_);
  in.expect_end();
  encoded_table_.assign(encoded.begin(), encoded.end());
}

void PlanDecoder::decode_parts(ByteReader& in, PlanSink& sink) const {
  const uint64_t sets = in.count(4);
  uint64_t budget = kMaxRanks;
  for (uint64_t i = 0; i < sets; ++i) sink.holder_set(read_ranks(in, budget));
  PlanChunk chunk;
  for (uint64_t count = in.count(2); count > 0; --count) {
    wire::index_below(in, chunk.tensor, table_.size(), "a chunk's tensor");
    const uint64_t word = in.varint();
    if (word / 16 > sets) in.fail("a chunk's holders are out of range");
    chunk.holders = word < 16 ? PlanChunk::kUnknown : static_cast<uint32_t>(word / 16 - 1);
    chunk.unknown_replicas = (word & 4) != 0;
    chunk.common = (word & 2) != 0;
    chunk.main_replica = (word & 1) != 0;
    wire::box(in, table_[chunk.tensor].global_shape, chunk.box);
    chunk.content = (word & 8) != 0 ? in.u64() : 0;
    sink.chunk(chunk);
  }
  PlanObject object;
  wire::Keys keys;
  for (uint64_t count = in.count(3); count > 0; --count) {
    keys.walk(in, object.key);
    const uint8_t flags = in.u8();
    if (flags > 7) in.fail("an object has unknown flags");
    object.common = (flags & 2) != 0;
    object.main_replica = (flags & 1) != 0;
    object.content = (flags & 4) != 0 ? in.u64() : 0;
    sink.object(object);
  }
  in.expect_end();
}

LocalSavePlan LocalSavePlan::decode(ByteView bytes) {
  struct Collect : PlanSink {
    void tensor_table(const std::vector<PlanTensor>& table, bool) override { plan.tensors = table; }
    void holder_set(std::vector<int> ranks) override {
      plan.holder_sets.push_back(std::move(ranks));
    }
    void chunk(const PlanChunk& chunk) override { plan.chunks.push_back(chunk); }
    void object(const PlanObject& object) override { plan.objects.push_back(object); }
    LocalSavePlan plan;
  } collect;
  PlanDecoder().decode(bytes, collect);
  return std::move(collect.plan);
}

Bytes Assignment::encode() const {
  ByteWriter out;
  out.u8(kAssignmentVersion);
  walk_assignment(out, *this);
  return std::move(out).take();
}

Assignment Assignment::decode(ByteView bytes) {
  ByteReader in(bytes, "assignment of a save plan");
  if (in.u8() != kAssignmentVersion) in.fail("the version is unknown");
  Assignment assignment;
  walk_assignment(in, assignment);
  in.expect_end();
  return assignment;
}

}  // namespace tilestone
