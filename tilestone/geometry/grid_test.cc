#include "tilestone/geometry/grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace tilestone::grid_test {

// All cells of a grid, as boxes inside the tensor.
std::vector<Box> cells_of(const Dims& shape, const Dims& cell_shape) {
  std::vector<Box> cells{Box::whole(Dims())};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<Box> wider;
    for (const Box& cell : cells) {
      for (int64_t begin = 0; begin < shape[d]; begin += cell_shape[d]) {
        Box next = cell;
        next.offset.push_back(begin);
        next.shape.push_back(std::min(cell_shape[d], shape[d] - begin));
        wider.push_back(next);
      }
    }
    cells = std::move(wider);
  }
  return cells;
}

TEST(Grid, OfCellsIsFoundAgainWhateverTheirOrder) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    Dims shape, cell_shape;
    for (size_t d = random() % 5; d > 0; --d) {
      shape.push_back(static_cast<int64_t>(random() % 7));
      cell_shape.push_back(1 + static_cast<int64_t>(random() % 4));
    }
    std::vector<Box> cells = cells_of(shape, cell_shape);
    std::shuffle(cells.begin(), cells.end(), random);
    const auto found = grid_of(shape, cells);
    ASSERT_TRUE(found) << to_string(shape) << to_string(cell_shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      const int64_t wanted = cells.empty() ? 1 : std::min(cell_shape[d], shape[d]);
      EXPECT_EQ((*found)[d], wanted) << to_string(shape) << to_string(cell_shape);
    }
    for (const Box& cell : cells) {
      EXPECT_EQ(cell_box(cell_index(cell, *found), shape, *found), cell);
    }
  }
}

TEST(Grid, EdgeCellsMayBeNarrowerThanTheOthers) {
  const std::vector<Box> rows{{{0}, {3}}, {{3}, {3}}, {{6}, {3}}, {{9}, {1}}};
  EXPECT_EQ(grid_of({10}, rows), Dims{3});
}

TEST(Grid, OfBoxesThatAreNoCellsIsRefusedWithOneOfThem) {
  Box odd;
  const std::vector<Box> uneven{{{0}, {2}}, {{2}, {3}}, {{5}, {5}}};
  EXPECT_FALSE(grid_of({10}, uneven, &odd));
  EXPECT_EQ(odd, (Box{{0}, {2}}));
  const std::vector<Box> first_is_narrow{{{0, 0}, {1, 4}}, {{1, 0}, {2, 4}}, {{3, 0}, {1, 4}}};
  EXPECT_FALSE(grid_of({4, 4}, first_is_narrow));
  // Cells of equal size, but the second row of them is shifted.
  const std::vector<Box> shifted{
      {{0, 0}, {2, 2}}, {{0, 2}, {2, 2}}, {{2, 0}, {2, 1}}, {{2, 1}, {2, 2}}, {{2, 3}, {2, 1}}};
  EXPECT_FALSE(grid_of({4, 4}, shifted, &odd));
  EXPECT_EQ(odd, (Box{{2, 0}, {2, 1}}));
}

TEST(Grid, EmptyBoxesDontCount) {
  const std::vector<Box> boxes{{{0}, {0}}, {{0}, {4}}, {{4}, {0}}, {{4}, {4}}, {{8}, {0}}};
  EXPECT_EQ(grid_of({8}, boxes), Dims{4});
  EXPECT_FALSE(is_cell({{4}, {0}}, {8}, {4}));
}

TEST(Grid, OfATensorWithoutElementsOrDims) {
  const std::vector<Box> empty{{{0, 0}, {0, 5}}};
  EXPECT_EQ(grid_of({0, 5}, empty), (Dims{1, 1}));
  const std::vector<Box> scalar{Box::whole(Dims())};
  EXPECT_EQ(grid_of(Dims(), scalar), Dims());
  EXPECT_TRUE(is_cell(scalar[0], Dims(), Dims()));
  EXPECT_EQ(cell_box(Dims(), Dims(), Dims()), scalar[0]);
}

TEST(Grid, HasNoCellOutside) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(cell_box({2}, {8}, {4}));
  EXPECT_FALSE(cell_box({-1}, {8}, {4}));
  EXPECT_FALSE(cell_box({0}, {0}, {4}));
  EXPECT_FALSE(cell_box({0, 0}, {8}, {4}));
  EXPECT_FALSE(cell_box({huge}, {huge}, {1}));
  EXPECT_EQ(cell_box({huge - 1}, {huge}, {1}), (Box{{huge - 1}, {1}}));
  EXPECT_EQ(cell_box({1}, {huge}, {huge - 1}), (Box{{huge - 1}, {1}}));
}

}  // namespace tilestone::grid_test
