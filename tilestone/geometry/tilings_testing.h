// Sets of boxes for tests: tilings of a tensor, regular and not, and sets that slow algorithms
// stumble over. Deterministic for a seed.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tilestone/geometry/box.h"

namespace tilestone {

// Every cell of a regular grid; counts divide the shape.
std::vector<Box> grid_tiling(const Dims& shape, const Dims& counts);

// At least `count` boxes from recursive cuts at random places of random dims (fewer only when the
// tensor runs out of elements), shuffled.
std::vector<Box> random_tiling(const Dims& shape, size_t count, std::mt19937_64& random);

// Rods along all three axes of a cube of (2 * side)^3 elements, side^2 each way, none of which
// meet. Cutting space into cells that hold whole rods takes n^1.5 pieces.
std::vector<Box> crossing_rods(int64_t side);

}  // namespace tilestone
