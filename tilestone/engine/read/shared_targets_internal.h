// Load targets that share memory, as tied weights do: the checkpoint must hold the same values for
// them, or the last one read would win.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tilestone/state/items.h"

namespace tilestone::engine {

// Looks at targets in host memory; n pieces take time n log n. Two pieces of which neither is
// contiguous are seen to share memory only where their views are the same.
class SharedTargets {
 public:
  // Before the load: a piece of which elements may lie in an earlier one gets memory of its own.
  void part(std::vector<TensorItem>& tensors);
  // After it: such pieces get back their memory, filled. Error(kMismatch) naming both keys where
  // the loaded values differ.
  void join(std::vector<TensorItem>& tensors);

 private:
  // A piece and the bytes [begin, end) that it reaches over.
  struct MemoryRange {
    std::byte* begin;
    std::byte* end;
    uint32_t item;
    uint32_t piece;
  };
  struct Parted {
    MemoryRange extent;
    uint32_t owner;  // the item that it shares memory with; kAnyOwner: those of segments
    TensorView memory;
  };
  static constexpr uint32_t kAnyOwner = ~uint32_t{0};

  static MemoryRange extent_of(const TensorView& view, uint32_t item, uint32_t piece);
  void take(std::vector<TensorItem>& tensors, const MemoryRange& extent, uint32_t owner);
  void part_dense(std::vector<TensorItem>& tensors, std::vector<MemoryRange>& dense);
  void part_sparse(std::vector<TensorItem>& tensors, std::vector<MemoryRange>& sparse);
  std::vector<MemoryRange>::const_iterator first_segment_after(const std::byte* address) const;
  // The item with which a parted piece disagrees; kAnyOwner: none.
  uint32_t disagreeing(const Parted& parted, const TensorView& loaded) const;
  uint32_t disagreeing_element(const Parted& parted, const TensorView& loaded) const;

  std::vector<MemoryRange> segments_;  // disjoint, ascending: what contiguous pieces fill in place
  std::vector<Parted> parted_;
};

}  // namespace tilestone::engine
