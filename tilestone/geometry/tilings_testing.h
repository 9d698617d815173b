// Sets of boxes for tests: regular and irregular tilings of a tensor, and sets that are hard for
// slow algorithms. Deterministic for a given seed.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tilestone/geometry/box.h"

namespace tilestone {

// All cells of a regular grid. Each dim of `counts` must divide that of `shape`.
std::vector<Box> grid_tiling(const Dims& shape, const Dims& counts);

// At least `count` boxes, made by recursive cuts at random places of random dims, and shuffled.
// There are fewer only if the tensor runs out of elements.
std::vector<Box> random_tiling(const Dims& shape, size_t count, std::mt19937_64& random);

// Rods along all three axes of a cube of (2 * side)^3 elements, side^2 rods per axis. No two rods
// intersect. Dividing the space into cells that only contain whole rods takes n^1.5 cells.
std::vector<Box> crossing_rods(int64_t side);

}  // namespace tilestone
