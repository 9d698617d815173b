// Finds the regular grids whose cells the tensors' chunks are, for formats that store one cell per
// file.
#pragma once

#include <span>
#include <vector>

#include "tilestone/plan/save_plan.h"

namespace tilestone {

// Returns the cell shape of each tensor: grids[r][t] for plans[r].tensors[t]. It is all ones for a
// tensor without elements. Linear in the number of chunks. Throws Error(kInvalidArgument), naming
// key, box and rank, if a tensor's boxes are not the cells of one grid. Only cells at the upper
// edges may be smaller.
std::vector<std::vector<Dims>> plan_grids(std::span<const LocalSavePlan> plans);

}  // namespace tilestone
