// Box: a half-open n-dimensional range of elements of a tensor. The currency of all planning.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tilestone/geometry/dims.h"

namespace tilestone {

struct Box {
  // offset + shape fits an int64 in every dim; check_bounds proves it of a box from outside.
  Dims offset;  // first element, in elements, >= 0
  Dims shape;   // extent in elements, >= 0; as many dims as offset (0 dims: a scalar's one element)

  static Box whole(const Dims& shape) { return {Dims(shape.size(), 0), shape}; }

  size_t rank() const { return shape.size(); }  // number of dims
  int64_t end(size_t dim) const { return offset[dim] + shape[dim]; }
  bool empty() const;  // holds no element
  int64_t numel() const { return tilestone::numel(shape); }
  bool contains(const Box& other) const;  // an empty box is contained everywhere

  friend bool operator==(const Box&, const Box&) = default;
  friend bool operator<(const Box& a, const Box& b);  // by offset, then shape
};

std::string to_string(const Box& box);  // "[0:4, 8:16]"
uint64_t hash_of(const Box& box);

// The common elements, nullopt when there are none. Both boxes have the same number of dims.
std::optional<Box> intersect(const Box& a, const Box& b);
// The same question without building the answer.
bool intersects(const Box& a, const Box& b);

// Throws Error(kInvalidArgument) unless offset and shape have as many dims as global_shape, are
// not negative, and lie inside it (offset + shape overflow included). The message names the box.
void check_bounds(const Box& box, const Dims& global_shape);

// The parts of `a` that are not in `b`: at most 2 * dims disjoint boxes.
std::vector<Box> subtract(const Box& a, const Box& b);

}  // namespace tilestone
