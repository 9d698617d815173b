#include "tilestone/geometry/coverage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>

#include "tilestone/base/error.h"
#include "tilestone/geometry/tilings_testing.h"

namespace tilestone::coverage_test {

using Kind = TilingFault::Kind;

constexpr int64_t kManyBoxes = TILESTONE_TEST_BOXES;

// The number of boxes that contain each element of `wanted`, in C order.
std::vector<int> paint(const Box& wanted, const std::vector<Box>& boxes) {
  std::vector<int> counts(static_cast<size_t>(wanted.numel()), 0);
  const Dims strides = contiguous_strides(wanted.shape);
  for (size_t i = 0; i < counts.size(); ++i) {
    Box element{wanted.offset, Dims(wanted.rank(), 1)};
    for (size_t d = 0; d < wanted.rank(); ++d) {
      element.offset[d] += static_cast<int64_t>(i) / strides[d] % wanted.shape[d];
    }
    for (const Box& box : boxes) counts[i] += intersects(box, element) ? 1 : 0;
  }
  return counts;
}

bool any_pair_overlaps(const std::vector<Box>& boxes) {
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (intersects(boxes[i], boxes[j])) return true;
    }
  }
  return false;
}

void expect_agrees_with_painter(const Dims& shape, const Box& wanted,
                                const std::vector<Box>& boxes) {
  const auto pair = find_overlap(boxes);
  ASSERT_EQ(pair.has_value(), any_pair_overlaps(boxes));
  if (pair) {
    ASSERT_LT(pair->first, pair->second);
    ASSERT_TRUE(intersects(boxes[pair->first], boxes[pair->second]));
  }

  const auto counts = paint(wanted, boxes);
  const auto hole = find_uncovered(wanted, boxes);
  ASSERT_EQ(hole.has_value(), std::find(counts.begin(), counts.end(), 0) != counts.end());
  if (hole) {
    ASSERT_FALSE(hole->empty());
    ASSERT_TRUE(wanted.contains(*hole)) << to_string(*hole);
    for (const Box& box : boxes) ASSERT_FALSE(intersects(box, *hole)) << to_string(*hole);
  }

  const auto whole = paint(Box::whole(shape), boxes);
  const bool tiled = std::all_of(whole.begin(), whole.end(), [](int n) { return n == 1; });
  const auto fault = check_tiling(shape, boxes);
  ASSERT_EQ(!fault.has_value(), tiled);
  if (fault && fault->kind == Kind::kOverlap) {
    ASSERT_EQ(intersect(boxes[fault->first], boxes[fault->second]), fault->where);
  }
  if (fault && fault->kind == Kind::kUncovered) {
    ASSERT_FALSE(fault->where.empty());
    for (const Box& box : boxes) ASSERT_FALSE(intersects(box, fault->where));
  }
}

Box random_box(const Dims& shape, std::mt19937_64& random) {
  Box box{Dims(shape.size(), 0), Dims(shape.size(), 0)};
  for (size_t d = 0; d < shape.size(); ++d) {
    box.offset[d] = static_cast<int64_t>(random() % static_cast<uint64_t>(shape[d] + 1));
    box.shape[d] =
        static_cast<int64_t>(random() % static_cast<uint64_t>(shape[d] - box.offset[d] + 1));
    if (random() % 3 == 0) {  // a slab
      box.offset[d] = 0;
      box.shape[d] = shape[d];
    }
  }
  return box;
}

TEST(Coverage, AgreesWithAPainterOnTilingsWithBoxesTakenAwayAddedAndMoved) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    Dims shape;
    const size_t rank = random() % 5;
    for (size_t d = 0; d < rank; ++d) shape.push_back(1 + static_cast<int64_t>(random() % 6));
    auto boxes = random_tiling(shape, 1 + random() % 40, random);
    for (uint64_t n = random() % 3; n > 0 && !boxes.empty(); --n) boxes.pop_back();
    for (uint64_t n = random() % 3; n > 0; --n) boxes.push_back(random_box(shape, random));
    SCOPED_TRACE("seed " + std::to_string(seed) + ", shape " + to_string(shape));
    ASSERT_NO_FATAL_FAILURE(expect_agrees_with_painter(shape, random_box(shape, random), boxes));
  }
}

// More dims than the corner method supports.
TEST(Coverage, AgreesWithAPainterOnTilingsOfFiveAndSixDims) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    Dims shape;
    const size_t rank = 5 + random() % 2;
    for (size_t d = 0; d < rank; ++d) shape.push_back(1 + static_cast<int64_t>(random() % 4));
    auto boxes = random_tiling(shape, 1 + random() % 60, random);
    for (uint64_t n = random() % 2; n > 0 && !boxes.empty(); --n) boxes.pop_back();
    for (uint64_t n = random() % 2; n > 0; --n) boxes.push_back(random_box(shape, random));
    SCOPED_TRACE("seed " + std::to_string(seed) + ", shape " + to_string(shape));
    ASSERT_NO_FATAL_FAILURE(expect_agrees_with_painter(shape, random_box(shape, random), boxes));
  }
}

TEST(Coverage, WrongTilingsOfTheRightVolumeAreFound) {
  const std::vector<Box> twice{Box{{0}, {2}}, Box{{0}, {2}}};
  EXPECT_EQ(check_tiling(Dims{4}, twice)->kind, Kind::kOverlap);
  // The middle element is in two boxes, and one element in a corner is in none.
  const std::vector<Box> shifted{Box{{0, 0}, {2, 2}}, Box{{1, 1}, {2, 2}}, Box{{0, 2}, {1, 1}}};
  EXPECT_EQ(check_tiling(Dims{3, 3}, shifted)->kind, Kind::kOverlap);
}

TEST(Coverage, AgreesWithAPainterOnManyOverlappingBoxesAndSlabs) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    Dims shape;
    const size_t rank = 1 + random() % 4;
    for (size_t d = 0; d < rank; ++d) shape.push_back(2 + static_cast<int64_t>(random() % 7));
    std::vector<Box> boxes;
    for (uint64_t n = random() % 60; n > 0; --n) boxes.push_back(random_box(shape, random));
    SCOPED_TRACE("seed " + std::to_string(seed) + ", shape " + to_string(shape));
    ASSERT_NO_FATAL_FAILURE(expect_agrees_with_painter(shape, Box::whole(shape), boxes));
  }
}

TEST(Coverage, TheSearchForOverlapsIsRightBeyondTheSizeItComparesOneByOne) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed);
    auto boxes = random_tiling(Dims{60, 50, 40}, 3000, random);
    ASSERT_FALSE(find_overlap(boxes)) << "seed " << seed;
    Box intruder = boxes[random() % boxes.size()];
    const size_t d = random() % 3;
    intruder.shape = Dims(3, 1);
    intruder.offset[d] = intruder.offset[d] == 0 ? 1 : intruder.offset[d] - 1;
    boxes.insert(boxes.begin() + static_cast<std::ptrdiff_t>(random() % boxes.size()), intruder);
    const auto pair = find_overlap(boxes);
    ASSERT_TRUE(pair) << "seed " << seed;
    ASSERT_TRUE(intersects(boxes[pair->first], boxes[pair->second]));
  }
}

TEST(Coverage, ScalarsAndEmptyTensors) {
  EXPECT_FALSE(check_tiling(Dims{}, std::vector<Box>{Box{}}));
  EXPECT_EQ(check_tiling(Dims{}, std::vector<Box>{Box{}, Box{}})->kind, Kind::kOverlap);
  EXPECT_EQ(check_tiling(Dims{}, {})->kind, Kind::kUncovered);
  EXPECT_FALSE(check_tiling(Dims{3, 0}, {}));
  EXPECT_FALSE(find_uncovered(Box{{2}, {0}}, {}));
  EXPECT_EQ(find_uncovered(Box{}, {}), Box{});
}

TEST(Coverage, EmptyBoxesOnlyMatterForTheirBounds) {
  const std::vector<Box> boxes{Box{{0}, {4}}, Box{{2}, {0}}, Box{{4}, {0}}, Box{{2}, {0}}};
  EXPECT_FALSE(check_tiling(Dims{4}, boxes));
  EXPECT_FALSE(find_overlap(boxes));
  const auto fault = check_tiling(Dims{4}, std::vector<Box>{boxes[0], Box{{5}, {0}}});
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind, Kind::kOutOfBounds);
  EXPECT_EQ(fault->first, 1u);
}

TEST(Coverage, BoxesOutOfBoundsAreNamedOverflowAndWrongDimsIncluded) {
  for (const Box& bad : {Box{{3}, {2}}, Box{{-1}, {2}}, Box{{1}, {INT64_MAX}}, Box{{0}, {-1}},
                         Box{{INT64_MAX}, {INT64_MAX}}, Box{{0, 0}, {1, 1}}, Box{{0}, {1, 1}}}) {
    const auto fault = check_tiling(Dims{4}, std::vector<Box>{Box{{0}, {4}}, bad});
    ASSERT_TRUE(fault);
    EXPECT_EQ(fault->kind, Kind::kOutOfBounds);
    EXPECT_EQ(fault->first, 1u);
    EXPECT_EQ(fault->where, bad);
  }
}

TEST(Coverage, TensorsOfTheLargestSizeDoNotOverflow) {
  const int64_t half = INT64_MAX / 2;
  const std::vector<Box> boxes{Box{{0}, {half}}, Box{{half}, {INT64_MAX - half}}};
  EXPECT_FALSE(check_tiling(Dims{INT64_MAX}, boxes));
  const auto fault = check_tiling(Dims{INT64_MAX}, std::vector<Box>{boxes[1]});
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->where, boxes[0]);
}

TEST(Coverage, ChunksThatReachBeyondAndRepeatAreNoProblemForWhatIsWanted) {
  const std::vector<Box> stored{Box{{0, 0}, {8, 6}}, Box{{0, 0}, {8, 6}}, Box{{0, 4}, {8, 4}}};
  EXPECT_FALSE(find_uncovered(Box{{2, 2}, {3, 6}}, stored));
  const auto hole = find_uncovered(Box{{2, 2}, {3, 8}}, stored);
  ASSERT_TRUE(hole);
  EXPECT_TRUE((Box{{2, 8}, {3, 2}}.contains(*hole)));
}

// A million boxes. Nothing here is timed: a quadratic pass would exceed the test's time limit.

int64_t grid_side() {
  int64_t side = 1;
  while ((side + 1) * (side + 1) <= kManyBoxes) ++side;
  return side;
}

// `hole` is a part of the box that was removed from a tiling.
void expect_hole_in(const std::optional<Box>& hole, const Box& removed) {
  ASSERT_TRUE(hole);
  EXPECT_FALSE(hole->empty());
  EXPECT_TRUE(removed.contains(*hole)) << to_string(*hole) << " in " << to_string(removed);
}

void expect_tiling_hole_and_overlap_found(const Dims& shape, std::vector<Box> boxes) {
  EXPECT_FALSE(check_tiling(shape, boxes));
  EXPECT_FALSE(find_uncovered(Box::whole(shape), boxes));
  const size_t middle = boxes.size() / 2;
  const Box removed = boxes[middle];
  boxes[middle] = boxes[middle / 2];
  const auto twice = check_tiling(shape, boxes);
  ASSERT_TRUE(twice);
  EXPECT_EQ(twice->kind, Kind::kOverlap);
  EXPECT_EQ(twice->where, boxes[middle]);
  expect_hole_in(find_uncovered(Box::whole(shape), boxes), removed);
  boxes[middle].shape[0] = 0;
  const auto hole = check_tiling(shape, boxes);
  ASSERT_TRUE(hole);
  EXPECT_EQ(hole->kind, Kind::kUncovered);
  expect_hole_in(hole->where, removed);
}

TEST(CoverageAtScale, RegularGrid) {
  const int64_t side = grid_side();
  const Dims shape{side * 4, side * 2, 3};
  expect_tiling_hole_and_overlap_found(shape, grid_tiling(shape, {side, side, 1}));
}

TEST(CoverageAtScale, ThinSlabs) {
  const Dims shape{16, kManyBoxes * 2, 16};
  expect_tiling_hole_and_overlap_found(shape, grid_tiling(shape, {1, kManyBoxes, 1}));
}

TEST(CoverageAtScale, IrregularTiling) {
  std::mt19937_64 random(3);
  const Dims shape{1 << 20, 1 << 20};
  expect_tiling_hole_and_overlap_found(
      shape, random_tiling(shape, static_cast<size_t>(kManyBoxes) / 2, random));
}

TEST(CoverageAtScale, IrregularTilingInThreeDims) {
  std::mt19937_64 random(4);
  const Dims shape{1 << 14, 1 << 14, 1 << 14};
  expect_tiling_hole_and_overlap_found(
      shape, random_tiling(shape, static_cast<size_t>(kManyBoxes) / 8, random));
}

TEST(CoverageAtScale, RodsThatCrossWithoutMeeting) {
  int64_t side = 1;
  while (3 * (side + 1) * (side + 1) <= kManyBoxes / 40) ++side;
  const auto boxes = crossing_rods(side);
  const Dims shape(3, 2 * side);
  EXPECT_FALSE(find_overlap(boxes));
  const auto hole = check_tiling(shape, boxes);
  ASSERT_TRUE(hole);
  EXPECT_EQ(hole->kind, Kind::kUncovered);
  for (const Box& box : boxes) ASSERT_FALSE(intersects(box, hole->where));
}

// Every other row and every other column: a hole where both are odd.
std::vector<Box> crossing_lines(int64_t n) {
  std::vector<Box> boxes;
  for (int64_t i = 0; i < n; ++i) {
    boxes.push_back(Box{{2 * i, 0}, {1, 2 * n}});
    boxes.push_back(Box{{0, 2 * i}, {2 * n, 1}});
  }
  return boxes;
}

TEST(CoverageAtScale, RowsAndColumnsThatCrossEverywhere) {
  const int64_t n = kManyBoxes / 2;
  const std::vector<Box> boxes = crossing_lines(n);
  EXPECT_TRUE(find_overlap(boxes));
  const auto hole = find_uncovered(Box::whole(Dims{2 * n, 2 * n}), boxes);
  ASSERT_TRUE(hole);
  for (const Box& box : boxes) ASSERT_FALSE(intersects(box, *hole));
}

TEST(Coverage, AllRowsCoverWhateverColumnsCrossThem) {
  constexpr int64_t kLines = 100;
  std::vector<Box> boxes = crossing_lines(kLines);
  for (int64_t i = 0; i < kLines; ++i) boxes.push_back(Box{{2 * i + 1, 0}, {1, 2 * kLines}});
  EXPECT_FALSE(find_uncovered(Box::whole(Dims{2 * kLines, 2 * kLines}), boxes));
}

TEST(Coverage, TooManyCrossingLinesThatCoverEverythingAreRefused) {
  constexpr int64_t kLines = 3000;
  std::vector<Box> boxes = crossing_lines(kLines);
  for (int64_t i = 0; i < kLines; ++i) boxes.push_back(Box{{2 * i + 1, 0}, {1, 2 * kLines}});
  EXPECT_THROW(find_uncovered(Box::whole(Dims{2 * kLines, 2 * kLines}), boxes), Error);
}

TEST(CoverageAtScale, ShiftedCopiesThatOverlapEverywhere) {
  const int64_t side = grid_side();
  const Dims shape{side * 4, side * 4};
  auto boxes = grid_tiling(shape, {side, side});
  // Each box overlaps the next one, and the last ones exceed the bounds.
  for (Box& box : boxes) box.shape = Dims{6, 6};
  EXPECT_FALSE(find_uncovered(Box::whole(shape), boxes));
  EXPECT_TRUE(find_overlap(boxes));
}

TEST(CoverageAtScale, ManyEmptyBoxes) {
  std::vector<Box> boxes(static_cast<size_t>(kManyBoxes), Box{{5, 0}, {0, 7}});
  boxes.push_back(Box{{0, 0}, {5, 7}});
  EXPECT_FALSE(check_tiling(Dims{5, 7}, boxes));
}

}  // namespace tilestone::coverage_test
