#include "tilestone/plan/grid_plan.h"

#include <gtest/gtest.h>

#include "tilestone/base/error.h"

namespace tilestone::grid_plan_test {

LocalSavePlan plan_of(const Dims& shape, const std::vector<Box>& boxes) {
  LocalSavePlan plan;
  plan.tensors = {{"w", DType::kFloat32, shape}};
  for (const Box& box : boxes) {
    PlanChunk chunk;
    chunk.box = box;
    plan.chunks.push_back(chunk);
  }
  return plan;
}

TEST(GridPlan, ARankThatHasOnlyTheEdgeLearnsTheCellShapeFromTheOthers) {
  const std::vector<LocalSavePlan> plans = {plan_of({10, 2}, {{{0, 0}, {4, 2}}}),
                                            plan_of({10, 2}, {{{4, 0}, {4, 2}}}),
                                            plan_of({10, 2}, {{{8, 0}, {2, 2}}})};
  const auto grids = plan_grids(plans);
  ASSERT_EQ(grids.size(), 3u);
  for (const auto& grid : grids) EXPECT_EQ(grid, std::vector<Dims>({{4, 2}}));
}

TEST(GridPlan, EmptyBoxesNeedNothingAndATensorWithoutElementsHasOnes) {
  const std::vector<LocalSavePlan> plans = {plan_of({6}, {{{0}, {3}}, {{3}, {0}}}),
                                            plan_of({6}, {{{3}, {3}}})};
  EXPECT_EQ(plan_grids(plans)[0], std::vector<Dims>({{3}}));
  const std::vector<LocalSavePlan> empty = {plan_of({0, 5}, {{{0, 0}, {0, 5}}})};
  EXPECT_EQ(plan_grids(empty)[0], std::vector<Dims>({{1, 1}}));
}

TEST(GridPlan, AnIrregularGridIsRefusedWithKeyBoxAndRank) {
  const std::vector<LocalSavePlan> plans = {plan_of({10}, {{{0}, {3}}}),
                                            plan_of({10}, {{{3}, {7}}})};
  try {
    plan_grids(plans);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.key(), "w");
    EXPECT_GE(error.rank(), 0);
  }
}

}  // namespace tilestone::grid_plan_test
