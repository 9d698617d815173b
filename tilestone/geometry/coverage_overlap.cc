#include <algorithm>
#include <numeric>

#include "tilestone/base/error.h"
#include "tilestone/geometry/coverage.h"

// How two overlapping boxes are found in O(n log^(d-1) n) time for any n boxes. The algorithm
// follows Zomorodian and Edelsbrunner, "Fast software for box intersections", and stops at the
// first pair.
//
// Two intervals intersect if and only if one contains the other's low end. The search takes two
// lists of boxes: I, used as intervals, and P, used as points (their low ends). All pairs are known
// to intersect in the dims above the current dim d. Let m be a median of P's points. An interval
// that contains all of P's points intersects all of P in dim d. Such intervals are compared with P
// in the lower dims, in both roles, because there either box may contain the other's point. Every
// other interval has an end among the points, so it matters in at most two nodes of each level of
// the recursion into points below m and points from m on. In the last dim, one merge pass over the
// lists, sorted by low end, is enough.
//
// Dims in which all boxes intersect are left out, so a tensor split along one dim costs one sort.
// The boxes are renumbered by their low ends in the last dim searched. Lists of ascending numbers
// are then already sorted for the last pass, and are read from memory front to back.

namespace tilestone {
namespace {

using Pair = std::pair<size_t, size_t>;
using Ids = std::vector<uint32_t>;

struct Span {
  int64_t low = 0;
  int64_t high = 0;  // exclusive
};
using Spans = std::vector<Span>;  // the intervals of all boxes in one dim

struct EdgeRange {
  size_t dim = 0;
  double crowd = 0;  // estimate: how many boxes lie side by side along it
};

// Returns the dims in which not all boxes intersect. The most crowded dim comes first, because the
// search ends with it, in one pass.
std::vector<size_t> dims_to_search(std::span<const Box> boxes, std::span<const size_t> ids) {
  std::vector<EdgeRange> extents;
  for (size_t d = 0; d < boxes[ids.front()].rank(); ++d) {
    Span all{INT64_MAX, 0};
    Span common{0, INT64_MAX};
    double sum = 0;
    for (size_t id : ids) {
      const int64_t low = boxes[id].offset[d];
      const int64_t high = boxes[id].end(d);
      all = {std::min(all.low, low), std::max(all.high, high)};
      common = {std::max(common.low, low), std::min(common.high, high)};
      sum += static_cast<double>(high - low);
    }
    if (common.low < common.high) continue;
    extents.push_back({d, static_cast<double>(all.high - all.low) / sum});
  }
  std::stable_sort(extents.begin(), extents.end(),
                   [](const EdgeRange& a, const EdgeRange& b) { return a.crowd > b.crowd; });
  std::vector<size_t> dims;
  for (const EdgeRange& extent : extents) dims.push_back(extent.dim);
  return dims;
}

class OverlapSearch {
 public:
  // Each axis lists the same boxes in the same order, sorted by low end on the first axis.
  explicit OverlapSearch(std::vector<Spans> axes) : axes_(std::move(axes)) {}

  // Returns the positions of two boxes that overlap.
  std::optional<Pair> run() {
    Ids all(axes_.front().size());
    std::iota(all.begin(), all.end(), 0u);
    search(all, all, axes_.size() - 1);
    return found_;
  }

 private:
  // Lists with up to this many pairs are compared without dividing them further.
  static constexpr size_t kSmall = 1 << 18;

  const Span& interval(size_t axis, uint32_t id) const { return axes_[axis][id]; }

  // Whether the two boxes intersect on the axes [1, axis].
  bool meet_above(uint32_t a, uint32_t b, size_t axis) const {
    for (size_t i = 1; i <= axis; ++i) {
      const Span& x = interval(i, a);
      const Span& y = interval(i, b);
      if (x.low >= y.high || y.low >= x.high) return false;
    }
    return true;
  }

  // Compares the pairs from the two lists that intersect on axis 0.
  void compare_all(const Ids& some, const Ids& others, size_t axis) {
    size_t i = 0;
    size_t j = 0;
    while (i < some.size() && j < others.size() && !found_) {
      if (interval(0, some[i]).low <= interval(0, others[j]).low) {
        compare(some[i++], std::span(others).subspan(j), axis);
      } else {
        compare(others[j++], std::span(some).subspan(i), axis);
      }
    }
  }

  // Compares one box to those of `others` that begin inside it on axis 0. None of `others` begins
  // before it.
  void compare(uint32_t one, std::span<const uint32_t> others, size_t axis) {
    const int64_t high = interval(0, one).high;
    for (uint32_t other : others) {
      if (interval(0, other).low >= high) return;
      if (other == one || !meet_above(one, other, axis)) continue;
      found_ = Pair{one, other};
      return;
    }
  }

  // The last axis, on which both lists are sorted: any point inside an interval makes a pair.
  void sweep(const Ids& intervals, const Ids& points) {
    size_t from = 0;
    for (uint32_t a : intervals) {
      const Span& x = interval(0, a);
      while (from < points.size() && interval(0, points[from]).low < x.low) ++from;
      for (size_t i = from; i < points.size() && interval(0, points[i]).low < x.high; ++i) {
        if (points[i] == a) continue;  // itself
        found_ = Pair{a, points[i]};
        return;
      }
    }
  }

  // Sets found_ if a box of `intervals` and a different box of `points` intersect on the axes [0,
  // axis], where on this axis the point lies in the interval. Both lists are sorted by low end on
  // axis 0 and stay sorted. The recursion is at most log2(points) deep per axis.
  void search(const Ids& intervals, const Ids& points, size_t axis) {
    if (found_ || intervals.empty() || points.empty()) return;
    if (intervals.size() * points.size() <= kSmall) return compare_all(intervals, points, axis);
    if (axis == 0) return sweep(intervals, points);

    const Span range = point_range(points, axis);
    const bool divisible = range.low < range.high;
    Points halves;
    if (divisible) halves = halve(points, axis, range.low);
    Ids spanning;
    Ids low;
    Ids high;
    distribute(intervals, axis, range, halves.middle, spanning, low, high);
    search(spanning, points, axis - 1);
    search(points, spanning, axis - 1);
    if (!divisible) return;
    search(low, halves.low, axis);
    search(high, halves.high, axis);
  }

  struct Points {
    Ids low;   // below `middle`
    Ids high;  // from `middle` on
    int64_t middle = 0;
  };

  // Divides the intervals into those that span all points, those that extend below `middle` and
  // those that extend from `middle` on (or both). Every list is written unconditionally and its
  // count is increased conditionally: the branch would be unpredictable, and a misprediction costs
  // more than a store.
  void distribute(const Ids& intervals, size_t axis, const Span& range, int64_t middle,
                  Ids& spanning, Ids& low, Ids& high) const {
    for (Ids* list : {&spanning, &low, &high}) list->resize(intervals.size());
    size_t spanning_count = 0;
    size_t low_count = 0;
    size_t high_count = 0;
    for (uint32_t id : intervals) {
      const Span x = interval(axis, id);
      const bool spans = x.low <= range.low && x.high > range.high;
      spanning[spanning_count] = id;
      spanning_count += spans;
      low[low_count] = id;
      low_count += !spans && x.low < middle && x.high > range.low;
      high[high_count] = id;
      high_count += !spans && x.low <= range.high && x.high > middle;
    }
    spanning.resize(spanning_count);
    low.resize(low_count);
    high.resize(high_count);
  }

  Points split(const Ids& points, size_t axis, int64_t middle) const {
    Points halves{Ids(points.size()), Ids(points.size()), middle};
    size_t low_count = 0;
    size_t high_count = 0;
    for (uint32_t id : points) {
      const bool below = interval(axis, id).low < middle;
      halves.low[low_count] = id;
      low_count += below;
      halves.high[high_count] = id;
      high_count += !below;
    }
    halves.low.resize(low_count);
    halves.high.resize(high_count);
    return halves;
  }

  // Divides the points into two halves of about equal size, as far as equal points allow. Neither
  // half is empty. Cuts at the median of a sample, or at the median of all points if the sample was
  // misleading.
  Points halve(const Ids& points, size_t axis, int64_t lowest) const {
    constexpr size_t kSample = 127;
    if (points.size() > 8 * kSample) {
      Points halves = split(points, axis, median(points, points.size() / kSample, axis));
      if (std::min(halves.low.size(), halves.high.size()) >= points.size() / 8) return halves;
    }
    const int64_t middle = median(points, 1, axis);
    if (middle > lowest) return split(points, axis, middle);
    // Most points equal the lowest one. The next higher point is the best cut.
    int64_t above = INT64_MAX;
    for (uint32_t id : points) {
      const int64_t low = interval(axis, id).low;
      if (low > lowest) above = std::min(above, low);
    }
    return split(points, axis, above);
  }

  // The lowest and the highest point.
  Span point_range(const Ids& points, size_t axis) const {
    int64_t lowest = INT64_MAX;
    int64_t highest = 0;
    for (uint32_t id : points) {
      lowest = std::min(lowest, interval(axis, id).low);
      highest = std::max(highest, interval(axis, id).low);
    }
    return {lowest, highest};
  }

  // The median of every `step`-th point.
  int64_t median(const Ids& points, size_t step, size_t axis) const {
    std::vector<int64_t> lows;
    lows.reserve(points.size() / step + 1);
    for (size_t i = 0; i < points.size(); i += step) lows.push_back(interval(axis, points[i]).low);
    const auto middle = lows.begin() + static_cast<std::ptrdiff_t>(lows.size() / 2);
    std::nth_element(lows.begin(), middle, lows.end());
    return *middle;
  }

  std::vector<Spans> axes_;
  std::optional<Pair> found_;
};

}  // namespace

std::optional<Pair> find_overlap(std::span<const Box> boxes) {
  if (boxes.size() > UINT32_MAX) {
    throw Error(ErrorCode::kUnsupported, "a tensor with 2^32 boxes or more is not supported");
  }
  if (boxes.size() < 2) return std::nullopt;
  std::vector<size_t> ids;
  ids.reserve(boxes.size());
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!boxes[i].empty()) ids.push_back(i);
  }
  if (ids.size() < 2) return std::nullopt;
  const std::vector<size_t> dims = dims_to_search(boxes, ids);
  if (dims.empty()) return Pair{ids[0], ids[1]};  // all boxes intersect in every dim
  std::sort(ids.begin(), ids.end(), [&](size_t a, size_t b) {
    return boxes[a].offset[dims.front()] < boxes[b].offset[dims.front()];
  });
  std::vector<Spans> axes;
  for (size_t d : dims) {
    Spans& axis = axes.emplace_back();
    axis.reserve(ids.size());
    for (size_t id : ids) axis.push_back({boxes[id].offset[d], boxes[id].end(d)});
  }
  const auto found = OverlapSearch(std::move(axes)).run();
  if (!found) return std::nullopt;
  return std::minmax(ids[found->first], ids[found->second]);
}

}  // namespace tilestone
