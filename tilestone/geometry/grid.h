// A regular grid over a tensor: cells of one shape, the first at the origin. Cells at the upper
// edges may reach beyond the tensor. Formats that store one cell a file need a tensor's chunks to
// be the cells of one grid.
#pragma once

#include <optional>
#include <span>

#include "tilestone/geometry/box.h"

namespace tilestone {

// Raises `cell_shape` to what `box` needs: the larger extent in each dim (an empty `cell_shape`
// becomes the box's shape). Done with all boxes of a tensor, in any order and on any rank, this is
// the shape of the only grid that they can be the cells of. Empty boxes need nothing.
void widen_cell(Dims& cell_shape, const Box& box);

// Whether `box` is the part inside the tensor of one cell of the grid. Both shapes have as many
// dims as the box; `cell_shape` has no zeros. An empty box is no cell.
bool is_cell(const Box& box, const Dims& shape, const Dims& cell_shape);

// The cell shape of the grid that all non-empty boxes are cells of; ones where there are no such
// boxes. nullopt when there is none; then `odd`, if given, is a box that does not fit the others.
std::optional<Dims> grid_of(const Dims& shape, std::span<const Box> boxes, Box* odd = nullptr);

// Which cell a box that is_cell() is: its index in each dim.
Dims cell_index(const Box& box, const Dims& cell_shape);

// The part inside the tensor of a cell; nullopt for an index outside the grid.
std::optional<Box> cell_box(const Dims& index, const Dims& shape, const Dims& cell_shape);

}  // namespace tilestone
