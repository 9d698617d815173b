// Do these boxes tile a tensor? No pass is quadratic: a million boxes take seconds.
#pragma once

#include <optional>
#include <span>
#include <utility>

#include "tilestone/geometry/box.h"

namespace tilestone {

// Two of the boxes that share an element, by index (first < second), or nullopt. Empty boxes
// overlap nothing; equal boxes overlap.
std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const Box> boxes);

// A non-empty box inside `wanted` no element of which lies in any of `boxes` (which may overlap
// one another and reach beyond it), or nullopt when `wanted` is covered.
std::optional<Box> find_uncovered(const Box& wanted, std::span<const Box> boxes);

// What is wrong with `boxes` as a tiling of a tensor of `shape`.
struct TilingFault {
  enum class Kind { kOutOfBounds, kOverlap, kUncovered };
  Kind kind;
  size_t first = 0;   // kOutOfBounds, kOverlap: index of the box
  size_t second = 0;  // kOverlap: index of the other box
  Box where;          // kOutOfBounds: the box; kOverlap: the common part; kUncovered: a hole
};

// nullopt when every element of the tensor lies in exactly one box, which is found in linear time
// where the boxes are cut in at most four dims; what is wrong takes a search, as above. Empty boxes
// are ignored but for their bounds.
std::optional<TilingFault> check_tiling(const Dims& shape, std::span<const Box> boxes);

}  // namespace tilestone
