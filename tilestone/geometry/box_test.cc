#include "tilestone/geometry/box.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>

#include "tilestone/base/error.h"

namespace tilestone::box_test {

using testing::HasSubstr;

std::set<std::vector<int64_t>> elements(const Box& box) {
  std::set<std::vector<int64_t>> all;
  if (box.empty()) return all;
  std::vector<int64_t> at(box.offset.begin(), box.offset.end());
  while (true) {
    all.insert(at);
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == box.end(d - 1)) {
      at[d - 1] = box.offset[d - 1];
      --d;
    }
    if (d == 0) return all;
  }
}

Box random_box(std::mt19937_64& random, size_t rank) {
  Box box{Dims(rank, 0), Dims(rank, 0)};
  for (size_t d = 0; d < rank; ++d) {
    box.offset[d] = static_cast<int64_t>(random() % 5);
    box.shape[d] = static_cast<int64_t>(random() % 5);
  }
  return box;
}

TEST(Box, RelativeToMovesTheOffsetAndKeepsTheShape) {
  EXPECT_EQ(relative_to({{3, 4}, {1, 2}}, {1, 4}), (Box{{2, 0}, {1, 2}}));
  EXPECT_EQ(relative_to({{}, {}}, {}), (Box{{}, {}}));
}

TEST(Box, IntersectContainsAndSubtractAgreeWithSetsOfElements) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 2000; ++round) {
    const size_t rank = random() % 4;
    const Box a = random_box(random, rank);
    const Box b = random_box(random, rank);
    const auto in_a = elements(a);
    const auto in_b = elements(b);
    std::set<std::vector<int64_t>> both;
    for (const auto& e : in_a) {
      if (in_b.contains(e)) both.insert(e);
    }
    const auto common = intersect(a, b);
    EXPECT_EQ(common.has_value(), !both.empty()) << to_string(a) << " " << to_string(b);
    EXPECT_EQ(intersects(a, b), !both.empty());
    if (common) {
      EXPECT_EQ(elements(*common), both);
    }
    EXPECT_EQ(a.contains(b), both == in_b) << to_string(a) << " " << to_string(b);

    const auto parts = subtract(a, b);
    EXPECT_LE(parts.size(), std::max<size_t>(2 * rank, 1));
    size_t count = 0;
    for (const Box& part : parts) {
      EXPECT_FALSE(part.empty());
      for (const auto& e : elements(part)) {
        ++count;
        EXPECT_TRUE(in_a.contains(e) && !in_b.contains(e));
      }
    }
    EXPECT_EQ(count, in_a.size() - both.size()) << to_string(a) << " - " << to_string(b);
  }
}

TEST(Box, AScalarsBoxHoldsOneElement) {
  const Box scalar = Box::whole(Dims{});
  EXPECT_FALSE(scalar.empty());
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_TRUE(intersects(scalar, scalar));
  EXPECT_TRUE(subtract(scalar, scalar).empty());
  EXPECT_EQ(to_string(scalar), "[]");
}

TEST(Box, PrintsAsSlices) { EXPECT_EQ(to_string(Box{{0, 8}, {4, 8}}), "[0:4, 8:16]"); }

TEST(Box, OrdersByOffsetThenShape) {
  EXPECT_LT((Box{{0, 1}, {9, 9}}), (Box{{0, 2}, {1, 1}}));
  EXPECT_LT((Box{{0}, {1}}), (Box{{0}, {2}}));
}

void expect_refused(const Box& box, const Dims& shape, const std::string& problem) {
  try {
    check_bounds(box, shape);
    ADD_FAILURE() << "accepted: " << problem;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(e.message(), HasSubstr(problem));
    EXPECT_THAT(e.message(), HasSubstr(to_string(box.offset)));
  }
}

TEST(Box, BoundsAcceptWhatLiesInsideEmptyBoxesAtTheEndIncluded) {
  check_bounds(Box{{0, 4}, {4, 4}}, Dims{4, 8});
  check_bounds(Box{{4, 0}, {0, 8}}, Dims{4, 8});
  check_bounds(Box{}, Dims{});
}

TEST(Box, BoundsRefuseWhatDoesNotOverflowIncluded) {
  expect_refused(Box{{0}, {4}}, Dims{4, 8}, "number of dims");
  expect_refused(Box{{0, 0}, {4}}, Dims{4}, "number of dims");
  expect_refused(Box{{-1, 0}, {4, 4}}, Dims{4, 8}, "dim 0 has a negative offset");
  expect_refused(Box{{0, 0}, {4, -4}}, Dims{4, 8}, "dim 1 has a negative size");
  expect_refused(Box{{0, 5}, {4, 4}}, Dims{4, 8}, "dim 1 ends beyond");
  expect_refused(Box{{INT64_MAX}, {INT64_MAX}}, Dims{8}, "dim 0 ends beyond");
  expect_refused(Box{{2}, {INT64_MAX}}, Dims{INT64_MAX}, "dim 0 ends beyond");
}

TEST(Box, ABoxThatOverflowsCanBePrinted) {
  EXPECT_EQ(to_string(Box{{2}, {INT64_MAX}}), "[2:2+9223372036854775807]");
}

}  // namespace tilestone::box_test
