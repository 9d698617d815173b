#include "tilestone/geometry/box_index.h"

#include <algorithm>
#include <numeric>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

constexpr uint32_t kLeaf = 8;  // boxes

Box bounds_of(std::span<const Box> boxes, std::span<const uint32_t> order) {
  Box bounds = boxes[order.front()];
  for (size_t d = 0; d < bounds.rank(); ++d) {
    int64_t begin = bounds.offset[d];
    int64_t end = bounds.end(d);
    for (uint32_t i : order) {
      begin = std::min(begin, boxes[i].offset[d]);
      end = std::max(end, boxes[i].end(d));
    }
    bounds.offset[d] = begin;
    bounds.shape[d] = end - begin;
  }
  return bounds;
}

// The dim along which about the most boxes lie side by side. The estimate is the extent of their
// union divided by the mean extent of a box.
size_t busiest_dim(std::span<const Box> boxes, std::span<const uint32_t> order, const Box& bounds) {
  size_t best = 0;
  double most = 0;
  for (size_t d = 0; d < bounds.rank(); ++d) {
    double sum = 0;
    for (uint32_t i : order) sum += static_cast<double>(boxes[i].shape[d]);
    const double count = static_cast<double>(bounds.shape[d]) / sum;
    if (count > most) {
      most = count;
      best = d;
    }
  }
  return best;
}

}  // namespace

BoxIndex::BoxIndex(std::span<const Box> boxes) : boxes_(boxes) {
  if (boxes.size() > UINT32_MAX) {
    throw Error(ErrorCode::kUnsupported, "a tensor with 2^32 boxes or more is not supported");
  }
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!boxes[i].empty()) order_.push_back(static_cast<uint32_t>(i));
  }
  if (order_.empty()) return;
  build(0, static_cast<uint32_t>(order_.size()));
  nodes_.shrink_to_fit();
}

uint32_t BoxIndex::build(uint32_t begin, uint32_t end) {
  const auto self = static_cast<uint32_t>(nodes_.size());
  const std::span<uint32_t> order(order_.data() + begin, end - begin);
  nodes_.push_back(Node{bounds_of(boxes_, order), begin, end, 0});
  if (end - begin <= kLeaf || nodes_[self].bounds.rank() == 0) return self;
  const size_t dim = busiest_dim(boxes_, order, nodes_[self].bounds);
  const uint32_t middle = begin + (end - begin) / 2;
  const auto twice_centre = [&](uint32_t i) {  // unsigned because it may exceed 2^63
    return 2 * static_cast<uint64_t>(boxes_[i].offset[dim]) +
           static_cast<uint64_t>(boxes_[i].shape[dim]);
  };
  std::nth_element(order.begin(), order.begin() + (middle - begin), order.end(),
                   [&](uint32_t a, uint32_t b) { return twice_centre(a) < twice_centre(b); });
  build(begin, middle);
  const uint32_t right = build(middle, end);
  nodes_[self].right = right;
  return self;
}

void BoxIndex::query(const Box& box, const std::function<bool(size_t)>& visit) const {
  if (nodes_.empty() || box.empty()) return;
  std::vector<uint32_t> open{0};
  while (!open.empty()) {
    const uint32_t at = open.back();
    open.pop_back();
    const Node& node = nodes_[at];
    if (!intersects(node.bounds, box)) continue;
    if (node.right != 0) {
      open.push_back(node.right);
      open.push_back(at + 1);
      continue;
    }
    for (uint32_t i = node.begin; i < node.end; ++i) {
      if (intersects(boxes_[order_[i]], box) && !visit(order_[i])) return;
    }
  }
}

}  // namespace tilestone
