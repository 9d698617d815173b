#include "tilestone/geometry/box.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tilestone/base/error.h"

namespace tilestone::flat_range_test {

// The flat indices of a box's elements, in C order.
std::vector<int64_t> flat_indices(const Dims& shape, const Box& box) {
  std::vector<int64_t> indices{0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> next;
    for (int64_t prefix : indices) {
      for (int64_t i = box.offset[d]; i < box.end(d); ++i) next.push_back(prefix * shape[d] + i);
    }
    indices = std::move(next);
  }
  return indices;
}

void check_every_range(const Dims& shape) {
  const int64_t total = numel(shape);
  const size_t most = shape.empty() ? 1 : 2 * shape.size() - 1;
  for (int64_t begin = 0; begin <= total; ++begin) {
    for (int64_t end = begin; end <= total; ++end) {
      const auto boxes = flat_range_to_boxes(shape, {begin, end});
      ASSERT_LE(boxes.size(), most) << to_string(shape) << " " << begin << " " << end;
      int64_t next = begin;
      for (const Box& box : boxes) {
        ASSERT_FALSE(box.empty());
        check_bounds(box, shape);
        for (int64_t index : flat_indices(shape, box)) {
          ASSERT_EQ(index, next++) << to_string(shape) << " " << begin << " " << end;
        }
      }
      ASSERT_EQ(next, end);
    }
  }
}

TEST(FlatRange, EveryRangeOfSmallShapesIsItsElementsInOrderInFewBoxes) {
  for (const Dims& shape :
       {Dims{}, Dims{1}, Dims{7}, Dims{3, 4}, Dims{1, 5}, Dims{5, 1}, Dims{2, 3, 4}, Dims{3, 1, 4},
        Dims{1, 1, 1}, Dims{4, 3, 1}, Dims{3, 2, 2, 3}, Dims{2, 1, 3, 1, 2}, Dims{2, 2, 2, 2, 2}}) {
    check_every_range(shape);
  }
}

TEST(FlatRange, TheBoundIsReached) {
  EXPECT_THAT(flat_range_to_boxes(Dims{4, 4, 4}, {1, 63}), testing::SizeIs(5));
}

TEST(FlatRange, WholeRowsAreOneBox) {
  EXPECT_THAT(flat_range_to_boxes(Dims{8, 4, 4}, {16, 64}),
              testing::ElementsAre(Box{{1, 0, 0}, {3, 4, 4}}));
}

TEST(FlatRange, EmptyTensorsAndRangesGiveNoBox) {
  EXPECT_TRUE(flat_range_to_boxes(Dims{3, 0, 2}, {0, 0}).empty());
  EXPECT_TRUE(flat_range_to_boxes(Dims{3, 2}, {4, 4}).empty());
}

TEST(FlatRange, RangesOutsideTheTensorAreRefused) {
  for (const FlatRange range : {FlatRange{-1, 2}, FlatRange{3, 2}, FlatRange{0, 13}}) {
    try {
      flat_range_to_boxes(Dims{3, 4}, range);
      ADD_FAILURE() << range.begin << " " << range.end;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(e.message(), testing::HasSubstr("12 elements of a tensor of shape [3, 4]"));
    }
  }
}

TEST(FlatRange, HugeTensorsDoNotOverflow) {
  const Dims shape{int64_t{1} << 31, int64_t{1} << 31};
  const int64_t total = numel(shape);
  const auto boxes = flat_range_to_boxes(shape, {1, total});
  ASSERT_EQ(boxes.size(), 2u);
  EXPECT_EQ(boxes[0].numel() + boxes[1].numel(), total - 1);
}

}  // namespace tilestone::flat_range_test
