#include "tilestone/geometry/box.h"

#include <string>

#include "tilestone/base/error.h"

// A flat index is a number whose digits, in the mixed radix of the shape, are the coordinates. The
// range [begin, end) is cut where carries happen. In decimal, [187, 523) becomes 187..190,
// 190..200, 200..500, 500..520, 520..523: up from `begin` in steps that grow coarser, then up to
// `end` in steps that grow finer. Each box fixes the leading coordinates, covers an interval of
// the next dim and spans the following dims, so it is a box. Each half cuts at most once in each of
// the n - 1 dims after the common prefix, and there is one box between them: 2n - 1 boxes.

namespace tilestone {
namespace {

// The box with fixed coordinates before dim d, [from, to) in dim d, and all of the dims after it.
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

void check_range(FlatRange range, int64_t total, const Dims& shape) {
  if (range.begin < 0 || range.begin > range.end || range.end > total) {
    throw Error(ErrorCode::kInvalidArgument,
                "flat range [" + std::to_string(range.begin) + ", " + std::to_string(range.end) +
                    ") is not within the " + std::to_string(total) +
                    " elements of a tensor of shape " + to_string(shape));
  }
}

}  // namespace

std::vector<Box> flat_range_to_boxes(const Dims& shape, FlatRange range) {
  const int64_t total = numel(shape);
  check_range(range, total, shape);
  if (range.begin == range.end) return {};
  const size_t n = shape.size();
  if (n == 0 || (range.begin == 0 && range.end == total)) return {Box::whole(shape)};

  // The coordinates of `end` are those of the last element plus one, with carries. The carry stops
  // at the first dim in which first and last element differ, so that coordinate may equal the dim's
  // size.
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
  for (size_t d = n - 1; d > common; --d) {  // first half: complete the row that `at` is in
    if (at[d] == 0) continue;
    if (at[d] < shape[d]) boxes.push_back(slab(shape, at, d, at[d], shape[d]));
    at[d] = 0;
    ++at[d - 1];  // may reach shape[d - 1]; the next iteration then only carries
  }
  if (at[common] < end[common]) {
    boxes.push_back(slab(shape, at, common, at[common], end[common]));
  }
  for (size_t d = common + 1; d < n; ++d) {  // second half
    if (end[d] > 0) boxes.push_back(slab(shape, end, d, 0, end[d]));
  }
  return boxes;
}

}  // namespace tilestone
