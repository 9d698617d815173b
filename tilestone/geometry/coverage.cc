#include "tilestone/geometry/coverage.h"

#include <algorithm>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/radix_sort.h"
#include "tilestone/geometry/box_index.h"

// How a hole (an uncovered box) is found: a cell that no box covers is halved at a median of the
// edges of boxes in it, until a part has no box. What is a tiling needs none of that.

namespace tilestone {
namespace {

using Boxes = std::vector<Box>;

Boxes clipped(const Box& cell, std::span<const Box> boxes) {
  Boxes inside;
  for (const Box& box : boxes) {
    if (auto common = intersect(cell, box)) inside.push_back(std::move(*common));
  }
  return inside;
}

struct Cut {
  size_t dim = 0;
  int64_t at = 0;
};

// Cuts at a median of the edges inside the cell, in the dim with the most edges. Each box has at
// least one such edge.
Cut choose_cut(const Box& cell, const Boxes& boxes) {
  std::vector<int64_t> best;
  Cut cut;
  for (size_t d = 0; d < cell.rank(); ++d) {
    std::vector<int64_t> edges;
    for (const Box& box : boxes) {
      if (box.offset[d] > cell.offset[d]) edges.push_back(box.offset[d]);
      if (box.end(d) < cell.end(d)) edges.push_back(box.end(d));
    }
    if (edges.size() > best.size()) {
      best = std::move(edges);
      cut.dim = d;
    }
  }
  const auto middle = best.begin() + static_cast<std::ptrdiff_t>(best.size() / 2);
  std::nth_element(best.begin(), middle, best.end());
  cut.at = *middle;
  return cut;
}

std::pair<Box, Box> halves(const Box& cell, const Cut& cut) {
  Box low = cell;
  Box high = cell;
  low.shape[cut.dim] = cut.at - cell.offset[cut.dim];
  high.offset[cut.dim] = cut.at;
  high.shape[cut.dim] = cell.end(cut.dim) - cut.at;
  return {low, high};
}

bool covers(const Box& cell, const Boxes& boxes) {
  return std::any_of(boxes.begin(), boxes.end(), [&](const Box& b) { return b.contains(cell); });
}

// Returns a hole of the cell. The boxes lie inside the cell and may overlap. The recursion ends
// because each step halves the edges in one dim. `clips` is how many boxes it may still clip.
std::optional<Box> find_hole(const Box& cell, const Boxes& boxes, uint64_t& clips) {
  if (boxes.empty()) return cell;
  if (covers(cell, boxes)) return std::nullopt;
  if (boxes.size() > clips) {
    throw Error(ErrorCode::kUnsupported,
                "its chunks cross one another too often to find out whether one is missing");
  }
  clips -= boxes.size();
  const auto [low, high] = halves(cell, choose_cut(cell, boxes));
  auto hole = find_hole(low, clipped(low, boxes), clips);
  return hole ? hole : find_hole(high, clipped(high, boxes), clips);
}

// Boxes of a sharded tensor are clipped some dozens of times each; crossing ones as often as there
// are others.
std::optional<Box> hole_of(const Box& cell, const Boxes& boxes) {
  uint64_t clips = 1000 * std::max<uint64_t>(boxes.size(), 1000);
  return find_hole(cell, boxes, clips);
}

// ---- Tilings, by their corners
//
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

constexpr size_t kMaxCornerDims = 4;  // 16 corners per box

struct CornerAxis {
  size_t dim = 0;
  uint64_t stride = 0;
};

// The dims in which some box does not span the cell, with strides. nullopt if there are more than
// kMaxCornerDims of them, or if a corner has more than 2^62 possible positions.
std::optional<std::vector<CornerAxis>> axes_of(const Box& cell, std::span<const Box> boxes) {
  std::vector<CornerAxis> axes;
  uint64_t stride = 1;
  for (size_t d = cell.rank(); d-- > 0;) {
    const auto spans = [&](const Box& box) {
      return box.offset[d] == cell.offset[d] && box.shape[d] == cell.shape[d];
    };
    if (std::all_of(boxes.begin(), boxes.end(), spans)) continue;
    axes.push_back({d, stride});
    const uint64_t positions = static_cast<uint64_t>(cell.shape[d]) + 1;
    if (axes.size() > kMaxCornerDims || stride > (uint64_t{1} << 62) / positions)
      return std::nullopt;
    stride *= positions;
  }
  return axes;
}

// Appends the box's corners as position * 2 + sign, with the sign inverted if `flip` is 1.
void add_corners(const Box& cell, const Box& box, std::span<const CornerAxis> axes, uint64_t flip,
                 std::vector<uint64_t>& corners) {
  const size_t first = corners.size();
  corners.push_back(flip);
  for (const CornerAxis& axis : axes) {
    const int64_t begin = cell.offset[axis.dim];
    const uint64_t low = static_cast<uint64_t>(box.offset[axis.dim] - begin) * axis.stride * 2;
    const uint64_t high = static_cast<uint64_t>(box.end(axis.dim) - begin) * axis.stride * 2;
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

// Whether every element of the cell lies in exactly one of the boxes. The cell must have elements,
// and the boxes must lie inside it. Takes linear time (a radix sort). False, too, if this method
// can't decide: the boxes are cut in more than four dims, or the cell has about 2^62 positions or
// more.
bool tile_by_corners(const Box& cell, std::span<const Box> boxes) {
  const auto axes = axes_of(cell, boxes);
  if (!axes) return false;
  std::vector<uint64_t> corners;
  std::vector<uint64_t> scratch;
  corners.reserve((boxes.size() + 1) << axes->size());
  for (const Box& box : boxes) {
    if (!box.empty()) add_corners(cell, box, *axes, 0, corners);
  }
  add_corners(cell, cell, *axes, 1, corners);
  const uint64_t largest = corners.back() >> 1;  // the cell's last corner
  radix_sort(corners, scratch, largest, [](uint64_t corner) { return corner >> 1; });
  return cancel(corners);
}

bool in_bounds(const Box& box, const Dims& shape) {
  if (box.offset.size() != shape.size() || box.shape.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.shape[d] < 0 || box.offset[d] > shape[d]) return false;
    if (box.shape[d] > shape[d] - box.offset[d]) return false;
  }
  return true;
}

}  // namespace

std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const Box> boxes) {
  if (boxes.size() < 2) return std::nullopt;
  const BoxIndex index(boxes);
  std::optional<std::pair<size_t, size_t>> found;
  for (size_t i = 0; i < boxes.size() && !found; ++i) {
    index.query(boxes[i], [&](size_t other) {
      if (other != i) found = std::minmax(i, other);
      return other == i;
    });
  }
  return found;
}

std::optional<Box> find_uncovered(const Box& wanted, std::span<const Box> boxes) {
  if (wanted.empty()) return std::nullopt;
  Boxes inside = clipped(wanted, boxes);
  if (covers(wanted, inside)) return std::nullopt;
  std::sort(inside.begin(), inside.end());  // replicas are common and add nothing
  inside.erase(std::unique(inside.begin(), inside.end()), inside.end());
  return tile_by_corners(wanted, inside) ? std::nullopt : hole_of(wanted, inside);
}

std::optional<TilingFault> check_tiling(const Dims& shape, std::span<const Box> boxes) {
  using Kind = TilingFault::Kind;
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!in_bounds(boxes[i], shape)) return TilingFault{Kind::kOutOfBounds, i, 0, boxes[i]};
  }
  const Box whole = Box::whole(shape);
  if (whole.empty() || tile_by_corners(whole, boxes)) return std::nullopt;
  if (const auto pair = find_overlap(boxes)) {
    const Box& first = boxes[pair->first];
    return TilingFault{Kind::kOverlap, pair->first, pair->second,
                       *intersect(first, boxes[pair->second])};
  }
  auto hole = hole_of(whole, clipped(whole, boxes));
  if (!hole) return std::nullopt;
  return TilingFault{Kind::kUncovered, 0, 0, *std::move(hole)};
}

}  // namespace tilestone
