#include "tilestone/plan/access.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/size_text.h"
#include "tilestone/geometry/coverage.h"
#include "tilestone/plan/access_objects_internal.h"
#include "tilestone/plan/plan_sink_internal.h"
#include "tilestone/plan/planner_internal.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/plan/texts_internal.h"

namespace tilestone {
namespace {

using planner::kNone;
using planner::Listing;
using planner::Tensor;

std::string held_twice(uint32_t a, uint32_t b) {
  if (a == b) return " is held twice as main replica by " + rank_text(a);
  return " is held by the main replicas of ranks " + std::to_string(std::min(a, b)) + " and " +
         std::to_string(std::max(a, b));
}

// Searches all plans again for replicas of a box that no main replica holds.
class ReplicaFinder final : public PlanSink {
 public:
  ReplicaFinder(const std::string& key, const Box& where) : key_(key), where_(where) {}

  std::string look(std::span<const ByteView> plans) {
    PlanDecoder decoder;
    for (const ByteView plan : plans) {
      found_here_ = false;
      decoder.decode(plan, *this);
      if (found_here_) ranks_.push_back(static_cast<int>(rank_));
      ++rank_;
    }
    if (ranks_.empty()) return "held by no rank";
    return "held by no main replica; a replica of it is on " + ranks_text(ranks_);
  }

 private:
  void tensor_table(const std::vector<PlanTensor>& table, bool same) override {
    if (same) return;
    is_key_.clear();
    for (const PlanTensor& tensor : table) is_key_.push_back(tensor.key == key_);
  }
  void holder_set(std::vector<int>) override {}
  void chunk(const PlanChunk& chunk) override {
    found_here_ = found_here_ || (is_key_[chunk.tensor] && intersects(chunk.box, where_));
  }
  void object(const PlanObject&) override {}

  const std::string key_;
  const Box where_;
  std::vector<bool> is_key_;  // indexed by the plan's tensors
  uint32_t rank_ = 0;
  bool found_here_ = false;
  std::vector<int> ranks_;
};

// Collects the main replicas of all ranks.
class Access final : public PlanSink {
 public:
  void add(ByteView plan) {
    chunk_index_ = 0;
    decoder_.decode(plan, *this);
    ++rank_;
  }

  void check(std::span<const ByteView> plans) {
    std::vector<Listing> scratch;
    for (Tensor& tensor : tensors_.all()) {
      if (tensor.has_elements()) check(tensor, scratch, plans);
    }
    objects_.check();
    for (const Tensor& tensor : tensors_.all()) {
      if (const auto rank = objects_.first_rank_of_grid(tensor.key())) {
        planner::refuse_as_both(tensor.key(), *rank, tensor.first_rank());
      }
    }
  }

 private:
  void tensor_table(const std::vector<PlanTensor>& table, bool same) override;
  void holder_set(std::vector<int>) override {}
  void chunk(const PlanChunk& chunk) override;
  void object(const PlanObject& object) override;
  static void check(Tensor& tensor, std::vector<Listing>& scratch, std::span<const ByteView> plans);
  [[noreturn]] static void refuse(const Tensor& tensor, const TilingFault& fault,
                                  std::span<const ByteView> plans);

  PlanDecoder decoder_;
  planner::TensorTable tensors_;
  std::vector<uint32_t> common_ranks_;  // by tensor: the first rank that lists it as common
  std::set<std::pair<uint32_t, std::string>> seen_;  // (tensor, box) of unknown replicas
  AccessObjects objects_;
  uint32_t rank_ = 0;  // that is being added
  uint32_t chunk_index_ = 0;
};

void Access::tensor_table(const std::vector<PlanTensor>& table, bool same) {
  tensors_.add(table, same, rank_, [&](const Tensor& tensor) {
    const auto other = objects_.first_rank(tensor.key());
    if (other) planner::refuse_as_both(tensor.key(), *other, rank_);
    common_ranks_.push_back(kNone);
  });
}

void Access::chunk(const PlanChunk& chunk) {
  const uint32_t index = chunk_index_++;
  Tensor& tensor = tensors_.of_plan(chunk.tensor);
  if (!chunk.main_replica) return;
  const uint32_t id = tensors_.id(chunk.tensor);
  if (chunk.common) {
    uint32_t& first = common_ranks_[id];
    if (first == kNone) first = rank_;
    if (first != rank_) return;
  }
  if (chunk.unknown_replicas && !seen_.emplace(id, to_string(chunk.box)).second) return;
  tensor.add(chunk.box, rank_, index);
}

void Access::object(const PlanObject& object) {
  const Tensor* const tensor = tensors_.find(object.key);
  if (tensor != nullptr) planner::refuse_as_both(object.key, tensor->first_rank(), rank_);
  objects_.add(object, rank_);
}

void Access::check(Tensor& tensor, std::vector<Listing>& scratch, std::span<const ByteView> plans) {
  tensor.sort(scratch);
  const std::span<const Listing> listings = tensor.listings();
  const auto twice =
      std::adjacent_find(listings.begin(), listings.end(),
                         [](const Listing& a, const Listing& b) { return a.same_box(b); });
  if (twice != listings.end()) {
    throw Error(ErrorCode::kCoverage, kAccessPattern + ("box " + to_string(tensor.box(*twice))) +
                                          held_twice(twice->rank, (twice + 1)->rank))
        .with_key(tensor.key());
  }
  if (tensor.is_tiled_by_runs()) return;
  std::vector<Box> boxes;
  boxes.reserve(listings.size());
  for (const Listing& listing : listings) boxes.push_back(tensor.box(listing));
  if (const auto fault = check_tiling(tensor.shape(), boxes)) refuse(tensor, *fault, plans);
}

void Access::refuse(const Tensor& tensor, const TilingFault& fault,
                    std::span<const ByteView> plans) {
  std::string problem = kAccessPattern + ("box " + to_string(fault.where));
  if (fault.kind == TilingFault::Kind::kUncovered) {
    problem += " of a tensor of shape " + to_string(tensor.shape()) + " is " +
               ReplicaFinder(tensor.key(), fault.where).look(plans);
  } else {
    const std::span<const Listing> listings = tensor.listings();
    problem += held_twice(listings[fault.first].rank, listings[fault.second].rank);
  }
  throw Error(ErrorCode::kCoverage, problem).with_key(tensor.key());
}

}  // namespace

Bytes encode_access(const Items& items) {
  LocalSavePlan plan;
  for (const TensorItem& item : items.tensors) {
    const auto tensor = static_cast<uint32_t>(plan.tensors.size());
    plan.tensors.push_back({item.key, item.dtype, item.global_shape});
    for (const Piece& piece : item.pieces) {
      with_key(item.key, [&] { check_bounds(piece.box, item.global_shape); });
      plan.chunks.push_back({tensor, PlanChunk::kUnknown, is_main_replica(item.replica_id),
                             piece.box, item.common, item.unknown_replicas});
    }
  }
  for (const ObjectItem& item : items.objects) {
    plan.objects.push_back({item.key, item.common, is_main_replica(item.replica_id)});
  }
  return plan.encode();
}

void check_access(std::span<const ByteView> plans) {
  Access access;
  for (const ByteView plan : plans) access.add(plan);
  access.check(plans);
}

}  // namespace tilestone
