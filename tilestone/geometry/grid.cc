#include "tilestone/geometry/grid.h"

#include <algorithm>

namespace tilestone {

void widen_cell(Dims& cell_shape, const Box& box) {
  if (box.empty()) return;
  if (cell_shape.empty()) {
    cell_shape = box.shape;
    return;
  }
  for (size_t d = 0; d < box.rank(); ++d) {
    cell_shape[d] = std::max(cell_shape[d], box.shape[d]);
  }
}

bool is_cell(const Box& box, const Dims& shape, const Dims& cell_shape) {
  if (box.empty()) return false;
  for (size_t d = 0; d < box.rank(); ++d) {
    if (box.offset[d] % cell_shape[d] != 0) return false;
    if (box.shape[d] != std::min(cell_shape[d], shape[d] - box.offset[d])) return false;
  }
  return true;
}

std::optional<Dims> grid_of(const Dims& shape, std::span<const Box> boxes, Box* odd) {
  Dims cell_shape;
  for (const Box& box : boxes) widen_cell(cell_shape, box);
  if (cell_shape.empty()) return Dims(shape.size(), 1);
  for (const Box& box : boxes) {
    if (box.empty() || is_cell(box, shape, cell_shape)) continue;
    if (odd != nullptr) *odd = box;
    return std::nullopt;
  }
  return cell_shape;
}

Dims cell_index(const Box& box, const Dims& cell_shape) {
  Dims index = box.offset;
  for (size_t d = 0; d < index.size(); ++d) index[d] /= cell_shape[d];
  return index;
}

std::optional<Box> cell_box(const Dims& index, const Dims& shape, const Dims& cell_shape) {
  if (index.size() != shape.size()) return std::nullopt;
  Box box = Box::whole(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    // The number of cells in this dim, computed without overflow.
    const int64_t cells = shape[d] / cell_shape[d] + (shape[d] % cell_shape[d] != 0 ? 1 : 0);
    if (index[d] < 0 || index[d] >= cells) return std::nullopt;
    box.offset[d] = index[d] * cell_shape[d];
    box.shape[d] = std::min(cell_shape[d], shape[d] - box.offset[d]);
  }
  return box;
}

}  // namespace tilestone
