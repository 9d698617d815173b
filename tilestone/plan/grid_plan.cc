#include "tilestone/plan/grid_plan.h"

#include <string>
#include <string_view>
#include <unordered_map>

#include "tilestone/base/error.h"
#include "tilestone/geometry/grid.h"

namespace tilestone {
namespace {

[[noreturn]] void fail_irregular(const PlanTensor& tensor, const Box& box, const Dims& cell,
                                 size_t rank) {
  throw Error(ErrorCode::kInvalidArgument,
              "box " + to_string(box) +
                  " is not a cell of a regular grid (the tensor's cells would have shape " +
                  to_string(cell) + "), and the format can only store regular grids")
      .with_key(tensor.key)
      .with_rank(static_cast<int>(rank))
      .with_hint("shard the tensor evenly, or save as torch_dist");
}

}  // namespace

std::vector<std::vector<Dims>> plan_grids(std::span<const LocalSavePlan> plans) {
  std::unordered_map<std::string_view, Dims> cells;
  for (const LocalSavePlan& plan : plans) {
    for (const PlanChunk& chunk : plan.chunks) {
      widen_cell(cells[plan.tensors[chunk.tensor].key], chunk.box);
    }
  }
  std::vector<std::vector<Dims>> grids;
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    const LocalSavePlan& plan = plans[rank];
    std::vector<Dims>& grid = grids.emplace_back();
    for (const PlanTensor& tensor : plan.tensors) {
      const Dims& cell = cells[tensor.key];
      grid.push_back(cell.empty() ? Dims(tensor.global_shape.size(), 1) : cell);
    }
    for (const PlanChunk& chunk : plan.chunks) {
      const PlanTensor& tensor = plan.tensors[chunk.tensor];
      if (chunk.box.empty() || is_cell(chunk.box, tensor.global_shape, grid[chunk.tensor]))
        continue;
      fail_irregular(tensor, chunk.box, grid[chunk.tensor], rank);
    }
  }
  return grids;
}

}  // namespace tilestone
