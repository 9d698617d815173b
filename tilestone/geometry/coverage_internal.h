#pragma once

#include <optional>
#include <span>

#include "tilestone/geometry/box.h"

namespace tilestone {

// Whether every element of a tensor of `shape` lies in exactly one of the boxes, which lie inside
// it; it has elements. Linear time, in passes over the digits of places. nullopt: not decided this
// way (boxes cut in more than four dims, or about 2^62 places and more).
std::optional<bool> tile_by_corners(const Dims& shape, std::span<const Box> boxes);

}  // namespace tilestone
