// Checks whether boxes tile a tensor. A million boxes of a tensor that was sharded take seconds.
// Boxes made to cross one another everywhere are refused with Error(kUnsupported).
#pragma once

#include <optional>
#include <span>
#include <utility>

#include "tilestone/geometry/box.h"

namespace tilestone {

// Returns the indices of two boxes that share an element (first < second), or nullopt. An empty box
// overlaps nothing. Equal boxes overlap. Throws Error(kUnsupported) for 2^32 boxes or more.
std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const Box> boxes);

// Returns a non-empty box inside `wanted` that contains no element of any of `boxes`, or nullopt if
// the boxes cover `wanted`. The boxes may overlap and may extend beyond `wanted`.
std::optional<Box> find_uncovered(const Box& wanted, std::span<const Box> boxes);

// Why `boxes` do not tile a tensor.
struct TilingFault {
  enum class Kind { kOutOfBounds, kOverlap, kUncovered };
  Kind kind;
  size_t first = 0;   // kOutOfBounds, kOverlap: index of the box
  size_t second = 0;  // kOverlap: index of the other box
  Box where;  // kOutOfBounds: the box; kOverlap: the common part; kUncovered: an uncovered box
};

// Returns nullopt if every element of the tensor lies in exactly one box. Takes linear time to
// confirm a tiling whose boxes are cut in at most four dims. Otherwise it searches with the
// functions above. Empty boxes only have their bounds checked.
std::optional<TilingFault> check_tiling(const Dims& shape, std::span<const Box> boxes);

}  // namespace tilestone
