// What SavePlanner keeps of all ranks' plans, as compact as it can: see save_plan.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::planner {

inline constexpr uint32_t kNone = ~uint32_t{0};

// That a rank holds a box with elements. The box is given by its first and its last element, as
// places in the flattened tensor: boxes of one tensor are ordered by offset, then shape, as these
// two numbers are.
struct Listing {
  uint64_t first = 0;
  uint64_t last = 0;  // inclusive
  uint32_t rank = 0;
  uint32_t index : 31 = 0;  // in the rank's chunks
  uint32_t is_run : 1 = 0;  // the box's elements follow one another in the flattened tensor

  bool same_box(const Listing& other) const { return first == other.first && last == other.last; }
};
inline constexpr uint32_t kMaxChunks = uint32_t{1} << 31;  // of a rank

// A tensor and all that was listed of it, at first in the order of adding.
class Tensor {
 public:
  Tensor(std::string key, DType dtype, Dims shape, uint32_t rank);  // Error on too many elements

  const std::string& key() const { return key_; }
  DType dtype() const { return dtype_; }
  const Dims& shape() const { return shape_; }
  uint32_t first_rank() const { return first_rank_; }
  bool has_elements() const { return elements_ > 0; }
  Box box(const Listing& listing) const;

  // Has the place where the next listing goes fetched: it is far in memory, as all tensors' are.
  void prefetch() const { __builtin_prefetch(listings_.data() + listings_.size(), 1); }
  // A box inside the tensor. False where it has no elements: then nothing is kept.
  bool add(const Box& box, uint32_t rank, uint32_t index);
  // Orders the listings by box, those of one box by rank. `scratch` is memory to work in.
  void sort(std::vector<Listing>& scratch);
  // After sort(): the boxes are runs, each beginning where the one before ends, from the first
  // element to the last: they tile the tensor, which saves knowing them.
  bool is_tiled_by_runs() const;
  std::span<const Listing> listings() const { return listings_; }
  // After sort(): the listings from `begin` on that have the same box.
  std::span<const Listing> group(size_t begin) const;

  // Of a tensor without elements: the lowest rank that lists a chunk of it, and which.
  uint32_t empty_rank = kNone;
  uint32_t empty_chunk = 0;

 private:
  std::string key_;
  DType dtype_;
  Dims shape_;
  Dims strides_;
  uint64_t elements_;
  uint32_t first_rank_;
  std::vector<Listing> listings_;
};

// The distinct boxes of one tensor, each with the lowest rank that lists it.
struct Chunks {
  std::vector<Box> boxes;
  std::vector<uint32_t> ranks;
};

// Every element in exactly one chunk: Error(kCoverage) naming key, box and ranks.
void check_tiling(const Tensor& tensor, const Chunks& chunks);

}  // namespace tilestone::planner
