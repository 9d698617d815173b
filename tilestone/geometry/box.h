// Box: a half-open n-dimensional range of elements of a tensor. All planning works on boxes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tilestone/geometry/dims.h"

namespace tilestone {

struct Box {
  // offset + shape fits an int64 in every dim. check_bounds() verifies this for a box from outside.
  Dims offset;  // first element, in elements, >= 0
  Dims shape;   // size in elements, >= 0; as many dims as offset (0 dims: a scalar's one element)

  static Box whole(const Dims& shape) { return {Dims(shape.size(), 0), shape}; }

  size_t rank() const { return shape.size(); }  // number of dims
  int64_t end(size_t dim) const { return offset[dim] + shape[dim]; }
  bool empty() const;  // contains no element
  int64_t numel() const { return tilestone::numel(shape); }
  bool contains(const Box& other) const;  // always if `other` is empty

  friend bool operator==(const Box&, const Box&) = default;
  friend bool operator<(const Box& a, const Box& b);  // by offset, then shape
};

std::string to_string(const Box& box);  // "[0:4, 8:16]"
uint64_t hash_of(const Box& box);

// The elements that both boxes contain, or nullopt if there are none. Both boxes must have the same
// number of dims.
std::optional<Box> intersect(const Box& a, const Box& b);
// Returns whether intersect() would return a box, without building it.
bool intersects(const Box& a, const Box& b);

// The same box in coordinates that begin at `origin`, which is not beyond the box's offset.
Box relative_to(const Box& box, const Dims& origin);

// Throws Error(kInvalidArgument), with a message that names the box, unless offset and shape have
// as many dims as global_shape, are not negative, and lie inside it. Overflow of offset + shape
// counts as outside.
void check_bounds(const Box& box, const Dims& global_shape);

// The parts of `a` that are not in `b`: at most 2 * dims disjoint boxes.
std::vector<Box> subtract(const Box& a, const Box& b);

}  // namespace tilestone
