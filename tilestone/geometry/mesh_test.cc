#include "tilestone/geometry/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/error.h"

namespace tilestone::mesh_test {

void expect_refused(Dims shape, std::vector<int> ranks, std::vector<std::string> names,
                    const std::string& problem) {
  try {
    Mesh(std::move(shape), std::move(ranks), std::move(names));
    ADD_FAILURE() << "accepted: " << problem;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(e.message(), testing::HasSubstr(problem));
  }
}

TEST(Mesh, CoordinateAndRankAreInverse) {
  const Mesh mesh({2, 3}, {10, 4, 7, 1, 0, 25}, {"dp", "tp"});
  for (int rank : mesh.ranks()) EXPECT_EQ(mesh.rank_at(*mesh.coordinate(rank)), rank);
  EXPECT_EQ(mesh.coordinate(7), (Dims{0, 2}));
  EXPECT_EQ(mesh.coordinate(0), (Dims{1, 1}));
  EXPECT_EQ(mesh.coordinate(3), std::nullopt);
}

TEST(Mesh, NoDimsIsOneRank) {
  const Mesh mesh({}, {5});
  EXPECT_EQ(mesh.coordinate(5), Dims());
  EXPECT_EQ(mesh.rank_at(Dims()), 5);
}

TEST(Mesh, BadArgumentsAreRefused) {
  expect_refused({2, 2}, {0, 1, 2}, {}, "expected 4 ranks, got 3");
  expect_refused({2}, {3, 3}, {}, "rank 3 appears twice");
  expect_refused({2}, {-1, 3}, {}, "rank -1 is negative");
  expect_refused({0}, {}, {}, "size of at least 1");
  expect_refused({2}, {0, 1}, {"a", "b"}, "expected 1 dim names, got 2");
  expect_refused({1, 1}, {0}, {"a", "a"}, "dim name 'a' appears twice");
  expect_refused({1, 1}, {0}, {"a", ""}, "a dim name is empty");
}

TEST(Mesh, CoordinatesOutsideAreRefused) {
  const Mesh mesh = Mesh::grid({2, 3});
  EXPECT_THROW(mesh.rank_at({0, 3}), Error);
  EXPECT_THROW(mesh.rank_at({-1, 0}), Error);
  EXPECT_THROW(mesh.rank_at({0}), Error);
}

}  // namespace tilestone::mesh_test
