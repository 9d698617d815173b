// The regular grids that tensors' chunks are cells of, for formats that store one cell a file.
#pragma once

#include <span>
#include <vector>

#include "tilestone/plan/save_plan.h"

namespace tilestone {

// The cell shape of each tensor: grids[r][t] of plans[r].tensors[t]; ones for a tensor without
// elements. Linear in the number of chunks.
// Error(kInvalidArgument) naming key, box and rank when a tensor's boxes are no cells of one grid
// (only the cells at its upper edges may be smaller).
std::vector<std::vector<Dims>> plan_grids(std::span<const LocalSavePlan> plans);

}  // namespace tilestone
