#include <gtest/gtest.h>

#include "tilestone/base/error_testing.h"
#include "tilestone/comm/operation_internal.h"

namespace tilestone::comm_internal::operation_test {

TEST(Operation, TreeReachesEveryRankOnceInLogarithmicallyManySteps) {
  for (int size = 1; size <= 70; ++size) {
    std::vector<int> steps(static_cast<size_t>(size), -1);
    std::vector<int> reached = {0};
    steps[0] = 0;
    for (size_t i = 0; i < reached.size(); ++i) {
      for (int child : tree_children(reached[i], size)) {
        ASSERT_EQ(steps[child], -1) << "rank " << child << " of " << size << " reached twice";
        ASSERT_EQ(tree_parent(child), reached[i]);
        steps[child] = steps[reached[i]] + 1;
        ASSERT_LE(1 << (steps[child] - 1), size);
        reached.push_back(child);
      }
    }
    ASSERT_EQ(reached.size(), static_cast<size_t>(size));
    ASSERT_EQ(tree_parent(0), -1);
  }
}

TEST(Operation, ErrorsNameOperationAndRanks) {
  const Error timeout = timed_out("scatter", {2, 5});
  EXPECT_THAT(timeout, IsError(ErrorCode::kTimeout, "", "scatter", "deadline", "ranks 2 and 5"));
  EXPECT_EQ(timeout.rank(), 2);
  const Error failed = rank_failed("gather", {4}, "disk full");
  EXPECT_THAT(failed, IsError(ErrorCode::kRankFailed, "", "gather", "rank 4", "disk full"));
  EXPECT_EQ(failed.rank(), 4);
}

}  // namespace tilestone::comm_internal::operation_test
