#include <algorithm>
#include <vector>

#include "tilestone/base/radix_sort.h"
#include "tilestone/geometry/coverage_internal.h"

// Let f be the function that counts the boxes on each element. Take its difference along every dim
// in turn. For a single box, the result is +1 or -1 at each of the box's 2^d corners (ends are
// exclusive; -1 at a corner with an odd number of ends), and 0 elsewhere. A function that is 0 far
// from the origin can be recovered from its differences by summation, so two such functions are
// equal if and only if their differences are equal. Therefore the boxes tile the tensor if and only
// if their signed corners sum to the tensor's own signed corners.
//
// Each corner becomes a number: its flat index in a tensor that is larger by one in each dim. The
// corners are sorted in linear time and then cancelled. Dims that every box spans would cancel by
// themselves and are left out.

namespace tilestone {
namespace {

constexpr size_t kMaxCornerDims = 4;  // 16 corners per box

struct CornerAxis {
  size_t dim = 0;
  uint64_t stride = 0;
};

// The dims that some box does not span, with strides. nullopt if there are more than kMaxCornerDims
// of them, or if a corner has more than 2^62 possible positions.
std::optional<std::vector<CornerAxis>> axes_of(const Dims& shape, std::span<const Box> boxes) {
  std::vector<CornerAxis> axes;
  uint64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    const auto spans = [&](const Box& box) {
      return box.offset[d] == 0 && box.shape[d] == shape[d];
    };
    if (std::all_of(boxes.begin(), boxes.end(), spans)) continue;
    axes.push_back({d, stride});
    const uint64_t positions = static_cast<uint64_t>(shape[d]) + 1;
    if (axes.size() > kMaxCornerDims || stride > (uint64_t{1} << 62) / positions)
      return std::nullopt;
    stride *= positions;
  }
  return axes;
}

// Appends the box's corners as position * 2 + sign, with the sign inverted if `flip` is 1.
void add_corners(const Box& box, std::span<const CornerAxis> axes, uint64_t flip,
                 std::vector<uint64_t>& corners) {
  const size_t first = corners.size();
  corners.push_back(flip);
  for (const CornerAxis& axis : axes) {
    const uint64_t low = static_cast<uint64_t>(box.offset[axis.dim]) * axis.stride * 2;
    const uint64_t high = static_cast<uint64_t>(box.end(axis.dim)) * axis.stride * 2;
    const size_t count = corners.size();
    for (size_t i = first; i < count; ++i) {
      corners.push_back((corners[i] + high) ^ 1);
      corners[i] += low;
    }
  }
}

bool cancel(std::span<const uint64_t> sorted) {
  for (size_t i = 0; i < sorted.size();) {
    const uint64_t position = sorted[i] >> 1;
    int64_t sum = 0;
    for (; i < sorted.size() && sorted[i] >> 1 == position; ++i)
      sum += (sorted[i] & 1) != 0 ? -1 : 1;
    if (sum != 0) return false;
  }
  return true;
}

}  // namespace

std::optional<bool> tile_by_corners(const Dims& shape, std::span<const Box> boxes) {
  const auto axes = axes_of(shape, boxes);
  if (!axes) return std::nullopt;
  std::vector<uint64_t> corners;
  std::vector<uint64_t> scratch;
  corners.reserve((boxes.size() + 1) << axes->size());
  for (const Box& box : boxes) {
    if (!box.empty()) add_corners(box, *axes, 0, corners);
  }
  add_corners(Box::whole(shape), *axes, 1, corners);
  const uint64_t largest = corners.back() >> 1;  // the tensor's last corner
  radix_sort(corners, scratch, largest, [](uint64_t corner) { return corner >> 1; });
  return cancel(corners);
}

}  // namespace tilestone
