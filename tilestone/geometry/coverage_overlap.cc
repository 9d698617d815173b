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
// Coordinates are replaced by their ranks among the low ends of their dim. Dims in which all boxes
// meet are left out, so a tensor split along one dim costs one sort.

namespace tilestone {
namespace {

using Pair = std::pair<size_t, size_t>;
using Ids = std::vector<uint32_t>;

struct Interval {
  uint32_t low = 0;
  uint32_t high = 0;  // exclusive
};

// The boxes' intervals in one dim, coordinates replaced by ranks among the low ends.
struct Axis {
  std::vector<Interval> intervals;
  size_t distinct = 0;  // low ends
};

Axis make_axis(std::span<const Box> boxes, std::span<const size_t> ids, size_t dim) {
  std::vector<int64_t> lows(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) lows[i] = boxes[ids[i]].offset[dim];
  std::sort(lows.begin(), lows.end());
  lows.erase(std::unique(lows.begin(), lows.end()), lows.end());
  const auto rank_of = [&](int64_t value) {
    return static_cast<uint32_t>(std::lower_bound(lows.begin(), lows.end(), value) - lows.begin());
  };
  Axis axis;
  axis.distinct = lows.size();
  axis.intervals.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    axis.intervals[i] = {rank_of(boxes[ids[i]].offset[dim]), rank_of(boxes[ids[i]].end(dim))};
  }
  return axis;
}

// Dims in which some two boxes don't meet. The one with the most low ends comes first: the
// search ends with it, in one pass.
std::vector<Axis> make_axes(std::span<const Box> boxes, std::span<const size_t> ids) {
  std::vector<Axis> axes;
  for (size_t d = 0; d < boxes[ids.front()].rank(); ++d) {
    int64_t last_low = 0;
    int64_t first_high = INT64_MAX;
    for (size_t id : ids) {
      last_low = std::max(last_low, boxes[id].offset[d]);
      first_high = std::min(first_high, boxes[id].end(d));
    }
    if (last_low >= first_high) axes.push_back(make_axis(boxes, ids, d));
  }
  std::stable_sort(axes.begin(), axes.end(),
                   [](const Axis& a, const Axis& b) { return a.distinct > b.distinct; });
  return axes;
}

class OverlapSearch {
 public:
  explicit OverlapSearch(std::vector<Axis> axes) : axes_(std::move(axes)) {}

  // Positions of two boxes that overlap.
  std::optional<Pair> run() {
    Ids all(axes_.front().intervals.size());
    std::iota(all.begin(), all.end(), 0u);
    std::sort(all.begin(), all.end(),
              [&](uint32_t a, uint32_t b) { return interval(0, a).low < interval(0, b).low; });
    search(all, all, axes_.size() - 1);
    return found_;
  }

 private:
  // Up to this many pairs are compared one by one.
  static constexpr size_t kSmall = 512;

  const Interval& interval(size_t axis, uint32_t id) const { return axes_[axis].intervals[id]; }

  // Whether the two meet in the axes [0, axis].
  bool meet(uint32_t a, uint32_t b, size_t axis) const {
    for (size_t i = 0; i <= axis; ++i) {
      const Interval& x = interval(i, a);
      const Interval& y = interval(i, b);
      if (x.low >= y.high || y.low >= x.high) return false;
    }
    return true;
  }

  void compare_all(const Ids& intervals, const Ids& points, size_t axis) {
    for (uint32_t a : intervals) {
      for (uint32_t b : points) {
        if (a != b && meet(a, b, axis)) {
          found_ = Pair{a, b};
          return;
        }
      }
    }
  }

  // The last axis, in which both lists are sorted: any point in an interval is a pair.
  void sweep(const Ids& intervals, const Ids& points) {
    size_t from = 0;
    for (uint32_t a : intervals) {
      const Interval& x = interval(0, a);
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

    const auto [lowest, highest] = point_range(points, axis);
    Ids spanning;
    Ids rest;
    for (uint32_t id : intervals) {
      const Interval& x = interval(axis, id);
      if (x.high <= lowest || x.low > highest) continue;
      (x.low <= lowest && x.high > highest ? spanning : rest).push_back(id);
    }
    search(spanning, points, axis - 1);
    search(points, spanning, axis - 1);
    if (lowest == highest || rest.empty()) return;

    const uint32_t middle = median_above(points, axis, lowest);
    const auto keep = [](const Ids& ids, auto&& wanted) {
      Ids kept;
      std::copy_if(ids.begin(), ids.end(), std::back_inserter(kept), wanted);
      return kept;
    };
    search(keep(rest, [&](uint32_t id) { return interval(axis, id).low < middle; }),
           keep(points, [&](uint32_t id) { return interval(axis, id).low < middle; }), axis);
    search(keep(rest, [&](uint32_t id) { return interval(axis, id).high > middle; }),
           keep(points, [&](uint32_t id) { return interval(axis, id).low >= middle; }), axis);
  }

  std::pair<uint32_t, uint32_t> point_range(const Ids& points, size_t axis) const {
    uint32_t lowest = UINT32_MAX;
    uint32_t highest = 0;
    for (uint32_t id : points) {
      lowest = std::min(lowest, interval(axis, id).low);
      highest = std::max(highest, interval(axis, id).low);
    }
    return {lowest, highest};
  }

  // A median of the points, or where that is the lowest one the next point above it.
  uint32_t median_above(const Ids& points, size_t axis, uint32_t lowest) const {
    std::vector<uint32_t> lows(points.size());
    std::transform(points.begin(), points.end(), lows.begin(),
                   [&](uint32_t id) { return interval(axis, id).low; });
    const auto middle = lows.begin() + static_cast<std::ptrdiff_t>(lows.size() / 2);
    std::nth_element(lows.begin(), middle, lows.end());
    if (*middle > lowest) return *middle;
    uint32_t above = UINT32_MAX;
    for (uint32_t low : lows) {
      if (low > lowest) above = std::min(above, low);
    }
    return above;
  }

  std::vector<Axis> axes_;
  std::optional<Pair> found_;
};

}  // namespace

std::optional<Pair> find_overlap(std::span<const Box> boxes) {
  if (boxes.size() > UINT32_MAX) {
    throw Error(ErrorCode::kUnsupported, "more than 2^32 boxes of one tensor");
  }
  std::vector<size_t> ids;
  ids.reserve(boxes.size());
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!boxes[i].empty()) ids.push_back(i);
  }
  if (ids.size() < 2) return std::nullopt;
  std::vector<Axis> axes = make_axes(boxes, ids);
  if (axes.empty()) return Pair{ids[0], ids[1]};  // all meet in every dim
  const auto found = OverlapSearch(std::move(axes)).run();
  if (!found) return std::nullopt;
  return std::minmax(ids[found->first], ids[found->second]);
}

}  // namespace tilestone
