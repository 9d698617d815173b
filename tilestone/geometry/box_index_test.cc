#include "tilestone/geometry/box_index.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tilestone/geometry/tilings_testing.h"

namespace tilestone::box_index_test {

std::multiset<size_t> hits(const BoxIndex& index, const Box& box) {
  std::multiset<size_t> found;
  index.query(box, [&](size_t i) {
    found.insert(i);
    return true;
  });
  return found;
}

Box random_box(std::mt19937_64& random, size_t rank) {
  Box box{Dims(rank, 0), Dims(rank, 0)};
  for (size_t d = 0; d < rank; ++d) {
    box.offset[d] = static_cast<int64_t>(random() % 20);
    box.shape[d] = static_cast<int64_t>(random() % 9);
  }
  return box;
}

TEST(BoxIndex, FindsWhatAScanFindsEachOnce) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    const size_t rank = random() % 5;
    std::vector<Box> boxes;
    for (uint64_t n = random() % 200; n > 0; --n) boxes.push_back(random_box(random, rank));
    const BoxIndex index(boxes);
    for (int query = 0; query < 20; ++query) {
      const Box wanted = random_box(random, rank);
      std::multiset<size_t> expected;
      for (size_t i = 0; i < boxes.size(); ++i) {
        if (intersects(boxes[i], wanted)) expected.insert(i);
      }
      ASSERT_EQ(hits(index, wanted), expected) << "seed " << seed << " " << to_string(wanted);
    }
  }
}

TEST(BoxIndex, NoBoxesAndEmptyQueriesFindNothing) {
  const std::vector<Box> none;
  EXPECT_TRUE(hits(BoxIndex(none), Box{{0}, {4}}).empty());
  const std::vector<Box> one{Box{{0}, {4}}};
  EXPECT_TRUE(hits(BoxIndex(one), Box{{1}, {0}}).empty());
}

TEST(BoxIndex, StopsWhenTheVisitorSaysSo) {
  const std::vector<Box> boxes(50, Box{{0}, {4}});
  const BoxIndex index(boxes);
  int visits = 0;
  index.query(Box{{0}, {1}}, [&](size_t) { return ++visits < 3; });
  EXPECT_EQ(visits, 3);
}

TEST(BoxIndex, EachBoxOfALargeTilingFindsItself) {
  std::mt19937_64 random(1);
  const auto boxes =
      random_tiling(Dims{1 << 20, 1 << 20}, static_cast<size_t>(TILESTONE_TEST_BOXES) / 4, random);
  const BoxIndex index(boxes);
  for (size_t i = 0; i < boxes.size(); i += 16) {
    ASSERT_EQ(hits(index, boxes[i]), std::multiset<size_t>{i});
  }
}

TEST(BoxIndex, ManyEqualBoxesAreBuiltAndAllFound) {
  const std::vector<Box> boxes(100000, Box{{2, 3}, {4, 4}});
  EXPECT_EQ(hits(BoxIndex(boxes), Box{{0, 0}, {3, 4}}).size(), boxes.size());
}

}  // namespace tilestone::box_index_test
