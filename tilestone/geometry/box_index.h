// A static spatial index over boxes: which of a million boxes meet this one, in logarithmic time
// for compact boxes. A binary tree of bounding boxes, cut at medians.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tilestone/geometry/box.h"

namespace tilestone {

class BoxIndex {
 public:
  // Borrows the boxes, which must outlive the index and have the same number of dims. Empty boxes
  // are never found.
  explicit BoxIndex(std::span<const Box> boxes);

  // Calls visit(i) for every boxes[i] that shares an element with `box`, in no particular order;
  // stops early when visit returns false. Thread-safe.
  void query(const Box& box, const std::function<bool(size_t)>& visit) const;

 private:
  // A leaf holds boxes_[order_[i]] for i in [begin, end). An inner node's children are the node
  // after it and nodes_[right].
  struct Node {
    Box bounds;
    uint32_t begin = 0;
    uint32_t end = 0;
    uint32_t right = 0;  // 0: a leaf
  };
  uint32_t build(uint32_t begin, uint32_t end);

  std::span<const Box> boxes_;
  std::vector<uint32_t> order_;
  std::vector<Node> nodes_;
};

}  // namespace tilestone
