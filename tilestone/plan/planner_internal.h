// What SavePlanner keeps of all ranks' plans, as compact as it can: see save_plan.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::planner {

inline constexpr uint32_t kNone = ~uint32_t{0};

// A distinct (tensor, box) that holds elements.
struct Chunk {
  uint32_t first_rank = kNone;             // of those added, the first that lists it
  uint32_t last_rank = kNone;              // the last one; finish() keeps the owner here
  uint32_t holders = PlanChunk::kUnknown;  // unknown too where ranks don't agree on them
  uint32_t listers = 0;
};

// The chunks of one tensor, and a hash table to find them by box.
class Tensor {
 public:
  Tensor(std::string key, DType dtype, Dims shape, uint32_t rank)
      : key_(std::move(key)), dtype_(dtype), shape_(std::move(shape)), first_rank_(rank) {
    has_elements_ = numel(shape_) > 0;
  }

  const std::string& key() const { return key_; }
  DType dtype() const { return dtype_; }
  const Dims& shape() const { return shape_; }
  uint32_t first_rank() const { return first_rank_; }
  bool has_elements() const { return has_elements_; }
  size_t size() const { return chunks_.size(); }
  Chunk& chunk(uint32_t index) { return chunks_[index]; }
  const Chunk& chunk(uint32_t index) const { return chunks_[index]; }
  Box box(uint32_t index) const;
  bool box_before(uint32_t a, uint32_t b) const;  // box(a) < box(b)
  uint64_t bytes(uint32_t index) const;
  uint32_t find_or_add(const Box& box);  // of as many dims as the shape
  // Every element in exactly one chunk: Error(kCoverage) naming key, box and ranks.
  void check_tiling() const;

  // Of a tensor without elements: the lowest rank that lists a chunk of it, and which.
  uint32_t empty_rank = kNone;
  uint32_t empty_chunk = 0;

 private:
  // An entry of the hash table; the hash spares most looks at boxes, which are far in memory.
  struct Slot {
    uint32_t hash = 0;
    uint32_t index = kNone;
  };
  bool equals(uint32_t index, const Box& box) const;
  void grow();
  bool is_grid() const;
  const int64_t* coords(uint32_t index) const { return coords_.data() + index * 2 * shape_.size(); }

  std::string key_;
  DType dtype_;
  Dims shape_;
  uint32_t first_rank_;
  bool has_elements_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> coords_;  // each chunk's offset, then its shape
  std::vector<Slot> slots_;      // open addressing; a power of two, at most three quarters full
};

}  // namespace tilestone::planner
