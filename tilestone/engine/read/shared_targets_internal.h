// Load targets that share memory, such as tied weights. The checkpoint must hold the same values
// for all of them; otherwise the result would depend on which one is read last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tilestone/state/items.h"

namespace tilestone::engine {

// Handles targets in host memory. n pieces take O(n log n) time. Two pieces that are both not
// contiguous are found to share memory only if their views are equal.
class SharedTargets {
 public:
  // Before the load: gives temporary memory to each piece that may share elements with an earlier
  // one.
  void part(std::vector<TensorItem>& tensors);
  // After the load: gives these pieces back their own memory, filled with the loaded values.
  // Error(kMismatch), naming both keys, if values that share memory differ.
  void join(std::vector<TensorItem>& tensors);

 private:
  // A piece and the bytes [begin, end) over which it extends.
  struct MemoryRange {
    std::byte* begin;
    std::byte* end;
    uint32_t item;
    uint32_t piece;
  };
  struct Parted {
    MemoryRange extent;
    uint32_t owner;     // the item that it shares memory with; kAnyOwner: look in segments_
    TensorView memory;  // the piece's own memory
  };
  static constexpr uint32_t kAnyOwner = ~uint32_t{0};

  static MemoryRange extent_of(const TensorView& view, uint32_t item, uint32_t piece);
  void give_own_memory(std::vector<TensorItem>& tensors, const MemoryRange& extent, uint32_t owner);
  void part_dense(std::vector<TensorItem>& tensors, std::vector<MemoryRange>& dense);
  void part_sparse(std::vector<TensorItem>& tensors, std::vector<MemoryRange>& sparse);
  std::vector<MemoryRange>::const_iterator first_segment_after(const std::byte* address) const;
  // The item whose values contradict those of a parted piece; kAnyOwner: none.
  uint32_t disagreeing(const Parted& parted, const TensorView& loaded) const;
  uint32_t disagreeing_element(const Parted& parted, const TensorView& loaded) const;

  // Memory that contiguous pieces fill in place. Disjoint, in ascending order.
  std::vector<MemoryRange> segments_;
  std::vector<Parted> parted_;
};

}  // namespace tilestone::engine
