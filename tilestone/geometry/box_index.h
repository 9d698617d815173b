// A static spatial index over boxes. It finds which of a million boxes intersect a given box, in
// logarithmic time if the boxes are compact. It is a binary tree of bounding boxes, split at
// medians.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tilestone/geometry/box.h"

namespace tilestone {

class BoxIndex {
 public:
  // The index keeps a reference to the boxes: they must outlive it. All have the same number of
  // dims. Empty boxes are never found. Throws Error(kUnsupported) for 2^32 boxes or more.
  explicit BoxIndex(std::span<const Box> boxes);

  // Calls visit(i) for every boxes[i] that shares an element with `box`, in no particular order.
  // Stops when visit returns false. Thread-safe.
  void query(const Box& box, const std::function<bool(size_t)>& visit) const;

 private:
  // A leaf contains boxes_[order_[i]] for i in [begin, end). The children of an inner node are the
  // next node and nodes_[right].
  struct Node {
    Box bounds;
    uint32_t begin = 0;
    uint32_t end = 0;
    uint32_t right = 0;  // 0 in a leaf
  };
  uint32_t build(uint32_t begin, uint32_t end);

  std::span<const Box> boxes_;
  std::vector<uint32_t> order_;
  std::vector<Node> nodes_;
};

}  // namespace tilestone
