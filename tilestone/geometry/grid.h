// A regular grid over a tensor: all cells have one shape, and the first cell is at the origin.
// Cells at the upper edges may extend beyond the tensor. Formats that store one cell per file
// require a tensor's chunks to be the cells of one grid.
#pragma once

#include <optional>
#include <span>

#include "tilestone/geometry/box.h"

namespace tilestone {

// Raises each dim of `cell_shape` to the extent of `box` where that is larger. An empty
// `cell_shape` becomes the box's shape. Applied to all boxes of a tensor, in any order and on any
// rank, this gives the shape of the only grid whose cells they can be. Empty boxes change nothing.
void widen_cell(Dims& cell_shape, const Box& box);

// Whether `box` is one cell of the grid, clipped to the tensor. Both shapes have as many dims as
// the box. `cell_shape` contains no zeros. An empty box is not a cell.
bool is_cell(const Box& box, const Dims& shape, const Dims& cell_shape);

// The cell shape of the grid whose cells all non-empty boxes are. All ones if there are no such
// boxes. nullopt if there is no such grid; then `odd`, if not null, is set to a box that does not
// fit the others.
std::optional<Dims> grid_of(const Dims& shape, std::span<const Box> boxes, Box* odd = nullptr);

// The index, in each dim, of the cell that `box` is. is_cell() must be true for it.
Dims cell_index(const Box& box, const Dims& cell_shape);

// A cell, clipped to the tensor. nullopt if the index lies outside the grid.
std::optional<Box> cell_box(const Dims& index, const Dims& shape, const Dims& cell_shape);

}  // namespace tilestone
