// Converts a slice of a flattened tensor to boxes. A distributed optimizer's shards are such
// slices.
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

// The elements [begin, end) of a flattened C-contiguous tensor of `shape`, as disjoint boxes in
// flat order. Returns at most 2n - 1 boxes for n dims, and none for an empty range. Concatenating
// the boxes' elements gives the range's elements in order. Throws Error(kInvalidArgument) unless 0
// <= begin <= end <= numel(shape).
std::vector<Box> flat_range_to_boxes(const Dims& shape, FlatRange range);

}  // namespace tilestone
