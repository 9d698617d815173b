#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

#include "tilestone/base/radix_sort.h"
#include "tilestone/geometry/coverage.h"
#include "tilestone/plan/planner_internal.h"
#include "tilestone/plan/texts_internal.h"

namespace tilestone::planner {
namespace {

// Orders boxes that share their first element by the last element, and listings of one box by rank.
bool box_and_rank_before(const Listing& a, const Listing& b) {
  return std::tie(a.last, a.rank) < std::tie(b.last, b.rank);
}

}  // namespace

Tensor::Tensor(std::string key, DType dtype, Dims shape, uint32_t rank)
    : key_(std::move(key)), dtype_(dtype), shape_(std::move(shape)), first_rank_(rank) {
  elements_ = static_cast<uint64_t>(numel(shape_));
  if (elements_ > 0) strides_ = contiguous_strides(shape_);
}

Box Tensor::box(const Listing& listing) const {
  Box box{shape_, shape_};
  uint64_t first = listing.first;
  uint64_t last = listing.last;
  const auto set = [&](size_t d, uint64_t begin, uint64_t end) {
    box.offset[d] = static_cast<int64_t>(begin);
    box.shape[d] = static_cast<int64_t>(end - begin) + 1;
  };
  for (size_t d = shape_.size(); d-- > 1;) {
    const auto size = static_cast<uint64_t>(shape_[d]);
    set(d, first % size, last % size);
    first /= size;
    last /= size;
  }
  if (!shape_.empty()) set(0, first, last);
  return box;
}

bool Tensor::add(const Box& box, uint32_t rank, uint32_t index) {
  if (elements_ == 0) return false;
  uint64_t first = 0;
  uint64_t span = 0;  // distance from the first element to the last
  uint64_t elements = 1;
  for (size_t d = 0; d < shape_.size(); ++d) {
    const auto size = static_cast<uint64_t>(box.shape[d]);
    const auto stride = static_cast<uint64_t>(strides_[d]);
    if (size == 0) return false;
    first += static_cast<uint64_t>(box.offset[d]) * stride;
    span += (size - 1) * stride;
    elements *= size;
  }
  listings_.push_back({first, first + span, rank, index & (kMaxChunks - 1), span + 1 == elements});
  return true;
}

void Tensor::sort(std::vector<Listing>& scratch) {
  radix_sort(listings_, scratch, elements_, [](const Listing& listing) { return listing.first; });
  for (auto begin = listings_.begin(); begin != listings_.end();) {
    auto end = begin + 1;
    bool sorted = true;
    for (; end != listings_.end() && end->first == begin->first; ++end) {
      sorted = sorted && !box_and_rank_before(*end, *(end - 1));
    }
    if (!sorted) std::sort(begin, end, box_and_rank_before);
    begin = end;
  }
}

bool Tensor::is_tiled_by_runs() const {
  uint64_t end = 0;
  for (size_t i = 0; i < listings_.size(); ++i) {
    const Listing& listing = listings_[i];
    if (i > 0 && listing.same_box(listings_[i - 1])) continue;
    if (!listing.is_run || listing.first != end) return false;
    end = listing.last + 1;
  }
  return end == elements_;
}

std::span<const Listing> Tensor::group(size_t begin) const {
  size_t end = begin + 1;
  while (end < listings_.size() && listings_[end].same_box(listings_[begin])) ++end;
  return std::span(listings_).subspan(begin, end - begin);
}

void TensorTable::add(const std::vector<PlanTensor>& plan, bool same, uint32_t rank,
                      const Added& added) {
  if (same) return;
  ids_.resize(plan.size(), kNone);
  for (size_t i = 0; i < plan.size(); ++i) {
    const PlanTensor& listed = plan[i];
    uint32_t& id = ids_[i];  // most ranks list the same tensors as the previous one
    if (id == kNone || all_[id].key() != listed.key) {
      const auto next = static_cast<uint32_t>(all_.size());
      const auto [known, is_new] = by_key_.emplace(listed.key, next);
      id = known->second;
      if (is_new) {
        all_.emplace_back(listed.key, listed.dtype, listed.global_shape, rank);
        added(all_.back());
      }
    }
    const Tensor& other = all_[id];
    if (other.dtype() == listed.dtype && other.shape() == listed.global_shape) continue;
    throw Error(ErrorCode::kMismatch,
                "ranks disagree on a tensor: " + rank_text(other.first_rank()) + " has " +
                    described(other.dtype(), other.shape()) + ", " + rank_text(rank) + " has " +
                    described(listed.dtype, listed.global_shape))
        .with_key(listed.key);
  }
}

const Tensor* TensorTable::find(const std::string& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &all_[found->second];
}

void refuse_as_both(const std::string& key, uint32_t one, uint32_t other) {
  throw Error(ErrorCode::kMismatch, "the key is used for a tensor and for an object, on " +
                                        rank_text(std::min(one, other)) + " and on " +
                                        rank_text(std::max(one, other)))
      .with_key(key);
}

void OwnedChunks::make_room() {
  size_t words = 0;
  for (size_t r = 0; r < begin_.size(); ++r) {
    begin_[r] = words;
    words += words_[r];
  }
  bits_.assign(words, 0);
}

std::vector<uint32_t> OwnedChunks::of(uint32_t rank) const {
  std::vector<uint32_t> mine;
  const uint64_t* words = bits_.data() + begin_[rank];
  const uint32_t count = words_[rank];
  size_t total = 0;
  for (uint32_t w = 0; w < count; ++w) total += static_cast<size_t>(std::popcount(words[w]));
  mine.reserve(total);
  for (uint32_t w = 0; w < count; ++w) {
    for (uint64_t left = words[w]; left != 0; left &= left - 1) {
      mine.push_back(w * 64 + static_cast<uint32_t>(std::countr_zero(left)));
    }
  }
  return mine;
}

void expect_tiling(const std::string& key, const Dims& shape, const Chunks& chunks,
                   const std::string& holds) {
  const auto fault = check_tiling(shape, chunks.boxes);
  if (!fault) return;
  const auto held = [&](size_t i) {
    return rank_text(chunks.ranks[i]) + holds + "box " + to_string(chunks.boxes[i]);
  };
  std::string problem;
  switch (fault->kind) {
    case TilingFault::Kind::kOutOfBounds:
      problem = held(fault->first) + " outside a tensor of shape " + to_string(shape);
      break;
    case TilingFault::Kind::kOverlap:
      problem = held(fault->first) + ", " + held(fault->second) + ": they overlap in box " +
                to_string(fault->where);
      break;
    case TilingFault::Kind::kUncovered:
      problem = "no rank" + holds + "box " + to_string(fault->where) + " of a tensor of shape " +
                to_string(shape);
      break;
  }
  throw Error(ErrorCode::kCoverage, problem).with_key(key);
}

}  // namespace tilestone::planner
