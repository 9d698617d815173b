#include "tilestone/geometry/coverage.h"

#include <algorithm>
#include <vector>

#include "tilestone/base/radix_sort.h"

// How a hole (an uncovered box) is found. Boxes that don't overlap cover a cell if and only if
// their volumes add up to its volume. If they don't, the search halves the cell and continues in a
// half with too little volume.
//
// If boxes overlap, this is Klee's measure problem, solved as in Chan, "Klee's measure problem made
// easy" (2013). A box that spans the cell in all dims but one is a slab. The slabs are removed from
// the list of boxes, and the space that they cover is cut out of the cell, which shifts the
// coordinates behind it. Each remaining box has an edge of lower dimension in the cell, so halving
// the cell at a median of such edges halves the work: O(n log n) in one and two dims, O(n^(d/2)) in
// d dims.

namespace tilestone {
namespace {

using Boxes = std::vector<Box>;

// An interval of one dim of a cell that remains after slabs are cut out. The gaps of a dim are
// disjoint and ascending.
struct Gap {
  int64_t begin = 0;   // before the cut
  int64_t end = 0;     // exclusive, before the cut
  int64_t target = 0;  // the coordinate of `begin` after the cut
};
using Gaps = std::vector<Gap>;

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
};

// Counts the dims in which the box does not span the cell, up to two. `dim` is the last one
// counted.
int partial_dims(const Box& box, const Box& cell, size_t& dim) {
  int count = 0;
  for (size_t d = 0; d < cell.rank() && count < 2; ++d) {
    if (box.offset[d] > cell.offset[d] || box.end(d) < cell.end(d)) {
      dim = d;
      ++count;
    }
  }
  return count;
}

Gaps gaps_between(std::vector<Interval> slabs, int64_t begin, int64_t end) {
  std::sort(slabs.begin(), slabs.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  Gaps gaps;
  int64_t at = begin;
  int64_t target = begin;
  const auto add = [&](int64_t until) {
    if (until <= at) return;
    gaps.push_back({at, until, target});
    target += until - at;
  };
  for (const Interval& slab : slabs) {
    add(std::min(slab.begin, end));
    at = std::max(at, slab.end);
  }
  add(end);
  return gaps;
}

// The coordinate of `x` after everything outside the gaps is cut out.
int64_t squeeze(const Gaps& gaps, int64_t x) {
  auto next = std::upper_bound(gaps.begin(), gaps.end(), x,
                               [](int64_t value, const Gap& gap) { return value < gap.begin; });
  if (next == gaps.begin()) return gaps.front().target;
  const Gap& gap = *--next;
  return gap.target + (std::min(x, gap.end) - gap.begin);
}

// The first part of a squeezed interval that is contiguous in original coordinates, in those
// coordinates.
Interval stretch(const Gaps& gaps, Interval squeezed) {
  auto next = std::upper_bound(gaps.begin(), gaps.end(), squeezed.begin,
                               [](int64_t value, const Gap& gap) { return value < gap.target; });
  const Gap& gap = *--next;
  const int64_t shift = gap.begin - gap.target;
  return {squeezed.begin + shift, std::min(squeezed.end + shift, gap.end)};
}

// The gaps that slabs leave in each dim of a cell. Dims without slabs are unchanged.
class Squeeze {
 public:
  // Removes the slabs from `boxes`. No box may cover the whole cell.
  Squeeze(const Box& cell, Boxes& boxes) : gaps_(cell.rank()) {
    std::vector<std::vector<Interval>> slabs(cell.rank());
    std::erase_if(boxes, [&](const Box& box) {
      size_t dim = 0;
      if (partial_dims(box, cell, dim) != 1) return false;
      slabs[dim].push_back({box.offset[dim], box.end(dim)});
      return true;
    });
    for (size_t d = 0; d < cell.rank(); ++d) {
      if (slabs[d].empty()) continue;
      any_ = true;
      gaps_[d] = gaps_between(std::move(slabs[d]), cell.offset[d], cell.end(d));
      full_ = full_ || gaps_[d].empty();
    }
  }

  bool any() const { return any_; }
  bool full() const { return full_; }  // the slabs of some dim cover the cell

  void apply(Box& box) const {
    for (size_t d = 0; d < gaps_.size(); ++d) {
      if (gaps_[d].empty()) continue;
      const int64_t begin = squeeze(gaps_[d], box.offset[d]);
      box.shape[d] = squeeze(gaps_[d], box.end(d)) - begin;
      box.offset[d] = begin;
    }
  }

  // Maps a non-empty squeezed box back to original coordinates. The result may be only a part of
  // it.
  void undo(Box& box) const {
    for (size_t d = 0; d < gaps_.size(); ++d) {
      if (gaps_[d].empty()) continue;
      const Interval was = stretch(gaps_[d], {box.offset[d], box.end(d)});
      box.offset[d] = was.begin;
      box.shape[d] = was.end - was.begin;
    }
  }

 private:
  std::vector<Gaps> gaps_;
  bool any_ = false;
  bool full_ = false;
};

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
// because each step halves the edges in one dim.
std::optional<Box> find_hole(Box cell, Boxes boxes) {
  if (boxes.empty()) return cell;
  if (covers(cell, boxes)) return std::nullopt;
  const Squeeze squeeze(cell, boxes);
  if (squeeze.full()) return std::nullopt;
  if (squeeze.any()) {
    squeeze.apply(cell);
    for (Box& box : boxes) squeeze.apply(box);
    std::erase_if(boxes, [](const Box& box) { return box.empty(); });
  }
  std::optional<Box> hole;
  if (boxes.empty()) {
    hole = cell;
  } else if (!covers(cell, boxes)) {
    const auto [low, high] = halves(cell, choose_cut(cell, boxes));
    hole = find_hole(low, clipped(low, boxes));
    if (!hole) {
      boxes = clipped(high, boxes);
      hole = find_hole(high, std::move(boxes));
    }
  }
  if (hole) squeeze.undo(*hole);
  return hole;
}

enum class Filling { kLess, kExactly, kMore };

// How the sum of the boxes' volumes compares to `volume`. Can't overflow.
Filling filling(int64_t volume, std::span<const Box> boxes) {
  int64_t left = volume;
  for (const Box& box : boxes) {
    const int64_t part = box.numel();
    if (part > left) return Filling::kMore;
    left -= part;
  }
  return left == 0 ? Filling::kExactly : Filling::kLess;
}

// Returns a hole of the cell. The boxes lie inside the cell, do not overlap and do not fill it.
Box find_hole_among_disjoint(Box cell, Boxes boxes) {
  while (!boxes.empty()) {
    const auto [low, high] = halves(cell, choose_cut(cell, boxes));
    Boxes inside = clipped(low, boxes);
    if (filling(low.numel(), inside) == Filling::kLess) {
      cell = low;
    } else {
      inside = clipped(high, boxes);
      cell = high;
    }
    boxes = std::move(inside);
  }
  return cell;
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

// Whether every element of a tensor of `shape` lies in exactly one of the boxes. The tensor must
// have elements, and the boxes must lie inside it. Takes linear time (a radix sort). nullopt if
// this method can't decide: the boxes are cut in more than four dims, or the tensor has about 2^62
// positions or more.
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

bool in_bounds(const Box& box, const Dims& shape) {
  if (box.offset.size() != shape.size() || box.shape.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.shape[d] < 0 || box.offset[d] > shape[d]) return false;
    if (box.shape[d] > shape[d] - box.offset[d]) return false;
  }
  return true;
}

}  // namespace

std::optional<Box> find_uncovered(const Box& wanted, std::span<const Box> boxes) {
  const int64_t volume = wanted.numel();
  if (volume == 0) return std::nullopt;
  Boxes inside = clipped(wanted, boxes);
  if (covers(wanted, inside)) return std::nullopt;
  std::sort(inside.begin(), inside.end());  // replicas are common and add nothing
  inside.erase(std::unique(inside.begin(), inside.end()), inside.end());
  const Filling filled = filling(volume, inside);
  if (filled == Filling::kMore || find_overlap(inside)) return find_hole(wanted, std::move(inside));
  if (filled == Filling::kExactly) return std::nullopt;
  return find_hole_among_disjoint(wanted, std::move(inside));
}

std::optional<TilingFault> check_tiling(const Dims& shape, std::span<const Box> boxes) {
  using Kind = TilingFault::Kind;
  const int64_t volume = numel(shape);
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!in_bounds(boxes[i], shape)) return TilingFault{Kind::kOutOfBounds, i, 0, boxes[i]};
  }
  if (volume == 0) return std::nullopt;
  const auto tiled = tile_by_corners(shape, boxes);
  if (tiled && *tiled) return std::nullopt;
  if (const auto pair = find_overlap(boxes)) {
    const Box& first = boxes[pair->first];
    return TilingFault{Kind::kOverlap, pair->first, pair->second,
                       *intersect(first, boxes[pair->second])};
  }
  if (filling(volume, boxes) == Filling::kExactly) return std::nullopt;
  const Box whole = Box::whole(shape);
  return TilingFault{Kind::kUncovered, 0, 0,
                     find_hole_among_disjoint(whole, clipped(whole, boxes))};
}

}  // namespace tilestone
