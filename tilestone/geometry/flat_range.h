// A slice of a flattened tensor as boxes: what a distributed optimizer's shards are.
#pragma once

#include <cstdint>
#include <vector>

#include "tilestone/geometry/box.h"

namespace tilestone {

struct FlatRange {
  int64_t begin = 0;  // elements, half-open
  int64_t end = 0;
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

// The elements [begin, end) of a C-contiguous tensor of `shape`, flattened, as disjoint boxes in
// flat order: at most 2n - 1 for n dims, none for an empty range. Concatenating the boxes'
// elements gives the range's elements in order.
// Throws Error(kInvalidArgument) unless 0 <= begin <= end <= numel(shape).
std::vector<Box> flat_range_to_boxes(const Dims& shape, FlatRange range);

}  // namespace tilestone
