#pragma once

#include <optional>
#include <span>

#include "tilestone/geometry/box.h"

namespace tilestone {

// Returns whether every element of a tensor of `shape` lies in exactly one of the boxes. The tensor
// must have elements, and the boxes must lie inside it. Takes linear time (a radix sort). Returns
// nullopt if this method can't decide: the boxes are cut in more than four dims, or the tensor has
// about 2^62 positions or more.
std::optional<bool> tile_by_corners(const Dims& shape, std::span<const Box> boxes);

}  // namespace tilestone
