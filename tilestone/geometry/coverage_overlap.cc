#include <algorithm>
#include <numeric>

#include "tilestone/base/error.h"
#include "tilestone/geometry/coverage.h"

// Finding two boxes that overlap, in O(n log^(d-1) n) for n boxes whatever they look like (after
// Zomorodian and Edelsbrunner, "Fast software for box intersections", with an end at the first
// pair).
//
// Two intervals meet if and only if one holds the other's low end. So for two lists of boxes, I (in
// the role of intervals) and P (of points: their low ends), and all dims above d known to meet:
// take dim d. Let m be a median of P's points. The intervals that hold all of P's points
// meet all of P in this dim, and are compared with P in the dims below (both ways round, for there
// any of the two may hold the other's point). The other intervals have an end among the points, so
// each can matter in at most two nodes of each level of the recursion into points below m and
// points from m on. In the last dim one merging pass over the lists, sorted by low end, does.
//
// Dims in which all boxes meet are left out, so a tensor split along one dim costs one sort. The
// boxes are renumbered by their low ends in the last dim searched: lists of ascending numbers are
// then sorted for that last pass, and are read from memory front to back.

namespace tilestone {
namespace {

using Pair = std::pair<size_t, size_t>;
using Ids = std::vector<uint32_t>;

struct Span {
  int64_t low = 0;
  int64_t high = 0;  // exclusive
};
using Spans = std::vector<Span>;  // all boxes' intervals in one dim

struct EdgeRange {
  size_t dim = 0;
  double crowd = 0;  // about how many boxes lie side by side along it
};

// Dims in which some two boxes don't meet. The most crowded one comes first: the search ends with
// it, in one pass.
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
  // Each axis has the same boxes, sorted by low end on the first.
  explicit OverlapSearch(std::vector<Spans> axes) : axes_(std::move(axes)) {}

  // Positions of two boxes that overlap.
  std::optional<Pair> run() {
    Ids all(axes_.front().size());
    std::iota(all.begin(), all.end(), 0u);
    search(all, all, axes_.size() - 1);
    return found_;
  }

 private:
  // Lists with up to this many pairs are compared without further cuts.
  static constexpr size_t kSmall = 1 << 18;

  const Span& interval(size_t axis, uint32_t id) const { return axes_[axis][id]; }

  // Whether the two meet in the axes [1, axis].
  bool meet_above(uint32_t a, uint32_t b, size_t axis) const {
    for (size_t i = 1; i <= axis; ++i) {
      const Span& x = interval(i, a);
      const Span& y = interval(i, b);
      if (x.low >= y.high || y.low >= x.high) return false;
    }
    return true;
  }

  // Compares the pairs of the two lists that meet on axis 0.
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

  // Compares one box to those that begin inside it on axis 0; `others` begin no earlier.
  void compare(uint32_t one, std::span<const uint32_t> others, size_t axis) {
    const int64_t high = interval(0, one).high;
    for (uint32_t other : others) {
      if (interval(0, other).low >= high) return;
      if (other == one || !meet_above(one, other, axis)) continue;
      found_ = Pair{one, other};
      return;
    }
  }

  // The last axis, in which both lists are sorted: any point in an interval is a pair.
  void sweep(const Ids& intervals, const Ids& points) {
    size_t from = 0;
    for (uint32_t a : intervals) {
      const Span& x = interval(0, a);
      while (from < points.size() && interval(0, points[from]).low < x.low) ++from;
      for (size_t i = from; i < points.size() && interval(0, points[i]).low < x.high; ++i) {
        if (points[i] == a) continue;  // itself; at most once, the next one ends the search
        found_ = Pair{a, points[i]};
        return;
      }
    }
  }

  // Sets found_ when a box of `intervals` and another one of `points` meet in the axes [0, axis],
  // the point lying in the interval on this axis. Both lists are sorted by low end on axis 0, and
  // stay so. Recursion: at most log2(points) deep on each axis.
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
    Ids low;   // below the middle
    Ids high;  // from the middle on
    int64_t middle = 0;
  };

  // Sorts out which intervals span all points and which reach below or from the middle on. The
  // lists are filled by storing always and then counting, or not: which way a box goes can't be
  // predicted, and a wrong guess costs more than a store.
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

  // About as many points in each half, as far as equal points allow; none is empty. Cuts at the
  // median of a sample, or where that misleads, of all.
  Points halve(const Ids& points, size_t axis, int64_t lowest) const {
    constexpr size_t kSample = 127;
    if (points.size() > 8 * kSample) {
      Points halves = split(points, axis, median(points, points.size() / kSample, axis));
      if (std::min(halves.low.size(), halves.high.size()) >= points.size() / 8) return halves;
    }
    const int64_t middle = median(points, 1, axis);
    if (middle > lowest) return split(points, axis, middle);
    int64_t above = INT64_MAX;  // most points are the lowest one; the next is the best cut
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

  // The median of every step-th point.
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
    throw Error(ErrorCode::kUnsupported, "more than 2^32 boxes of one tensor");
  }
  if (boxes.size() < 2) return std::nullopt;
  std::vector<size_t> ids;
  ids.reserve(boxes.size());
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!boxes[i].empty()) ids.push_back(i);
  }
  if (ids.size() < 2) return std::nullopt;
  const std::vector<size_t> dims = dims_to_search(boxes, ids);
  if (dims.empty()) return Pair{ids[0], ids[1]};  // all meet in every dim
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
