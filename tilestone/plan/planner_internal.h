// What SavePlanner keeps of all ranks' plans, in a compact form: see save_plan.h.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::planner {

inline constexpr uint32_t kNone = ~uint32_t{0};

// Says that a rank holds a box with elements. The box is represented by the flat indices of its
// first and last elements. These two numbers order the boxes of a tensor in the same way as offset
// and then shape.
struct Listing {
  uint64_t first = 0;
  uint64_t last = 0;  // inclusive
  uint32_t rank = 0;
  uint32_t index : 31 = 0;  // index into the rank's chunks
  uint32_t is_run : 1 = 0;  // the box is contiguous in the flattened tensor

  bool same_box(const Listing& other) const { return first == other.first && last == other.last; }
};
inline constexpr uint32_t kMaxChunks = uint32_t{1} << 31;  // per rank

// A tensor and all its listings, at first in the order in which they were added.
class Tensor {
 public:
  Tensor(std::string key, DType dtype, Dims shape, uint32_t rank);  // throws on overflow

  const std::string& key() const { return key_; }
  DType dtype() const { return dtype_; }
  const Dims& shape() const { return shape_; }
  uint32_t first_rank() const { return first_rank_; }
  bool has_elements() const { return elements_ > 0; }
  Box box(const Listing& listing) const;

  // Prefetches the memory for the next listing: the tensors' listings are spread over memory.
  void prefetch() const { __builtin_prefetch(listings_.data() + listings_.size(), 1); }
  // Adds a box, which must be inside the tensor. Returns false, and keeps nothing, if the box has
  // no elements.
  bool add(const Box& box, uint32_t rank, uint32_t index);
  // Sorts the listings by box, and those of one box by rank. `scratch` is working memory.
  void sort(std::vector<Listing>& scratch);
  // Valid after sort(). Whether the boxes are runs, each beginning where the previous one ends,
  // from the first element to the last. Then they tile the tensor, and the boxes need not be
  // computed.
  bool is_tiled_by_runs() const;
  std::span<const Listing> listings() const { return listings_; }
  // Valid after sort(). The listings from `begin` on that have the same box.
  std::span<const Listing> group(size_t begin) const;

  // For a tensor without elements: the lowest rank that lists a chunk of it, and the index of that
  // chunk.
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

// The tensors that the ranks list, rank by rank.
class TensorTable {
 public:
  // Called with each tensor that no rank has listed before.
  using Added = std::function<void(const Tensor& tensor)>;

  // The tensors of the next rank's plan. `same`: they are those of the rank before. Throws
  // Error(kMismatch) if two ranks disagree on one.
  void add(const std::vector<PlanTensor>& plan, bool same, uint32_t rank, const Added& added);
  // Of that plan: the number of a tensor among all(), and the tensor.
  uint32_t id(uint32_t listed) const { return ids_[listed]; }
  Tensor& of_plan(uint32_t listed) {
    constexpr size_t kAhead = 8;  // tensors
    if (listed + kAhead < ids_.size()) all_[ids_[listed + kAhead]].prefetch();
    return all_[ids_[listed]];
  }
  std::vector<Tensor>& all() { return all_; }
  const std::vector<Tensor>& all() const { return all_; }
  const Tensor* find(const std::string& key) const;  // null: no rank lists it

 private:
  std::vector<Tensor> all_;
  std::unordered_map<std::string, uint32_t> by_key_;
  std::vector<uint32_t> ids_;  // of the plan that was added last
};

// Throws Error(kMismatch): one rank has a tensor, another one an object under the key.
[[noreturn]] void refuse_as_both(const std::string& key, uint32_t one, uint32_t other);

// Which chunks the ranks own: one bit for each chunk, so that the bits of all ranks fit a cache.
class OwnedChunks {
 public:
  explicit OwnedChunks(size_t ranks) : begin_(ranks, 0), words_(ranks, 0) {}
  void note_count(uint32_t rank, uint32_t chunks) { words_[rank] = chunks / 64 + 1; }
  void make_room();  // after note_count() of all ranks
  void set(uint32_t rank, uint32_t chunk) {
    bits_[begin_[rank] + chunk / 64] |= uint64_t{1} << chunk % 64;
  }
  std::vector<uint32_t> of(uint32_t rank) const;  // ascending

 private:
  std::vector<uint64_t> bits_;   // 64 per word, by rank
  std::vector<size_t> begin_;    // by rank: the index of its first word
  std::vector<uint32_t> words_;  // by rank: its number of words
};

// The distinct boxes of one tensor, each with the lowest rank that lists it.
struct Chunks {
  std::vector<Box> boxes;
  std::vector<uint32_t> ranks;
};

// Throws Error(kCoverage), naming key, box and ranks, unless every element is in exactly one chunk.
// `holds`: the verb, between spaces.
void expect_tiling(const std::string& key, const Dims& shape, const Chunks& chunks,
                   const std::string& holds);

}  // namespace tilestone::planner
