#include "tilestone/geometry/box.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone::dims_test {

Dims counting(size_t n) {
  Dims dims;
  for (size_t i = 0; i < n; ++i) dims.push_back(static_cast<int64_t>(i) + 1);
  return dims;
}

TEST(Dims, CopiesMovesAndAssignsBetweenInlineAndHeap) {
  for (size_t n = 0; n <= 9; ++n) {
    for (size_t m = 0; m <= 9; ++m) {
      const Dims a = counting(n);
      Dims b = counting(m);
      b = a;
      EXPECT_EQ(b, a) << n << " over " << m;
      Dims moved = std::move(b);
      EXPECT_EQ(moved, a);
      Dims c = counting(m);
      c = std::move(moved);
      EXPECT_EQ(c, a);
      Dims& self = c;
      c = self;
      EXPECT_EQ(c, a);
      EXPECT_EQ(c.size(), n);
    }
  }
}

TEST(Dims, BehavesAsAVectorUnderRandomPushesAndResizes) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    Dims dims;
    std::vector<int64_t> expected;
    for (int step = 0; step < 30; ++step) {
      const auto value = static_cast<int64_t>(random() % 1000);
      if (random() % 3 != 0) {
        dims.push_back(value);
        expected.push_back(value);
      } else {
        const size_t size = random() % 12;
        dims.resize(size, value);
        expected.resize(size, value);
      }
      ASSERT_TRUE(std::equal(dims.begin(), dims.end(), expected.begin(), expected.end()))
          << "round " << round << " step " << step;
      Dims copy = dims;  // a copy has its own storage
      copy.push_back(1);
      ASSERT_EQ(copy.size(), expected.size() + 1);
    }
  }
}

TEST(Dims, BracesListValuesAndParenthesesRepeatOne) {
  EXPECT_EQ(to_string(Dims{2, 3}), "[2, 3]");
  EXPECT_EQ(to_string(Dims(2, 3)), "[3, 3]");
  EXPECT_EQ(to_string(Dims()), "[]");
}

TEST(Dims, ComparesLexicographicallyShorterFirst) {
  EXPECT_LT((Dims{1, 9}), (Dims{2, 0}));
  EXPECT_LT((Dims{1}), (Dims{1, 0}));
  EXPECT_FALSE((Dims{1, 0}) < (Dims{1, 0}));
}

TEST(Dims, HashDependsOnOrderAndLength) {
  EXPECT_NE(hash_of(Dims{1, 2}), hash_of(Dims{2, 1}));
  EXPECT_NE(hash_of(Dims{}), hash_of(Dims{0}));
  EXPECT_EQ(hash_of(Dims{5, 6}), hash_of(Dims{5, 6}));
}

TEST(Dims, NumelOfNoDimsIsOneAndOfAZeroDimZero) {
  EXPECT_EQ(numel(Dims{}), 1);
  EXPECT_EQ(numel(Dims{3, 0, INT64_MAX, 2}), 0);
  EXPECT_EQ(numel(Dims{3, 4}), 12);
}

TEST(Dims, NumelRefusesNegativeDimsAndOverflow) {
  EXPECT_THROW(numel(Dims{3, -1}), Error);
  EXPECT_THROW(numel(Dims{0, -1}), Error);
  EXPECT_THROW(numel(Dims{int64_t{1} << 32, int64_t{1} << 31}), Error);
}

TEST(Dims, ContiguousStridesCountFromTheLastDim) {
  EXPECT_EQ(contiguous_strides(Dims{2, 3, 4}), (Dims{12, 4, 1}));
  EXPECT_EQ(contiguous_strides(Dims{}), Dims());
  EXPECT_EQ(contiguous_strides(Dims{2, 0, 4}), (Dims{4, 4, 1}));
  EXPECT_THROW(contiguous_strides(Dims{2, INT64_MAX, 2, 2}), Error);
}

}  // namespace tilestone::dims_test
