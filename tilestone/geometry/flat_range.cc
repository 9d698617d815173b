#include "tilestone/geometry/flat_range.h"

#include <string>

#include "tilestone/base/error.h"

// A flat index is a number whose digits, in the mixed radix of the shape, are the coordinates. The
// range [begin, end) is cut where carries happen, as [187, 523) is 187..190, 190..200, 200..500,
// 500..520, 520..523: up from `begin` in ever coarser steps, then down to `end` in ever finer
// ones. Each step fixes the leading coordinates, runs over an interval of one and takes the
// following dims whole, so it is a box. Going up cuts at most once in each of the n - 1 dims after
// the common prefix, going down likewise, and there is one run in between: 2n - 1.

namespace tilestone {
namespace {

// Coordinates fixed before dim d, [from, to) in dim d, all of the dims after it.
Box slab(const Dims& shape, const Dims& at, size_t d, int64_t from, int64_t to) {
  Box box = Box::whole(shape);
  for (size_t i = 0; i < d; ++i) {
    box.offset[i] = at[i];
    box.shape[i] = 1;
  }
  box.offset[d] = from;
  box.shape[d] = to - from;
  return box;
}

Dims unravel(const Dims& strides, int64_t index) {
  Dims at(strides.size(), 0);
  for (size_t d = 0; d < at.size(); ++d) {
    at[d] = index / strides[d];
    index %= strides[d];
  }
  return at;
}

}  // namespace

std::vector<Box> flat_range_to_boxes(const Dims& shape, FlatRange range) {
  const int64_t total = numel(shape);
  if (range.begin < 0 || range.begin > range.end || range.end > total) {
    throw Error(ErrorCode::kInvalidArgument,
                "flat range [" + std::to_string(range.begin) + ", " + std::to_string(range.end) +
                    ") does not lie in the " + std::to_string(total) +
                    " elements of a tensor of shape " + to_string(shape));
  }
  if (range.begin == range.end) return {};
  const size_t n = shape.size();
  if (n == 0 || (range.begin == 0 && range.end == total)) return {Box::whole(shape)};

  // The end's coordinates are the last element's plus one, with carries. The carry stops at the
  // first dim in which the two differ, whose coordinate may thus equal the dim's size.
  const Dims strides = contiguous_strides(shape);
  const Dims first = unravel(strides, range.begin);
  Dims end = unravel(strides, range.end - 1);
  size_t common = 0;  // leading dims in which the first and the last element agree
  while (common + 1 < n && first[common] == end[common]) ++common;
  for (size_t d = n; d-- > common;) {
    if (++end[d] < shape[d] || d == common) break;
    end[d] = 0;  // a carry
  }

  std::vector<Box> boxes;
  Dims at = first;
  for (size_t d = n - 1; d > common; --d) {  // up: finish the started row of each dim
    if (at[d] == 0) continue;
    if (at[d] < shape[d]) boxes.push_back(slab(shape, at, d, at[d], shape[d]));
    at[d] = 0;
    ++at[d - 1];  // may reach shape[d - 1]: a mere carry in the next round
  }
  if (at[common] < end[common]) {
    boxes.push_back(slab(shape, at, common, at[common], end[common]));
  }
  for (size_t d = common + 1; d < n; ++d) {  // down
    if (end[d] > 0) boxes.push_back(slab(shape, end, d, 0, end[d]));
  }
  return boxes;
}

}  // namespace tilestone
