#include "tilestone/plan/exchange_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tilestone/base/block_sums.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone::exchange_plan_test {

using testing::Each;
using testing::ElementsAre;

constexpr uint64_t kMiB = 1u << 20;

// `files` files that contain one chunk of `bytes` bytes each.
Metadata files_of(size_t files, uint64_t bytes) {
  Metadata metadata;
  StoredTensor tensor{"t", {}, DType::kUInt8, {1}, {}};
  for (size_t file = 0; file < files; ++file) {
    metadata.files.push_back(std::to_string(file));
    tensor.chunks.push_back({Box::whole({1}), {static_cast<uint32_t>(file), {}, 0, bytes, {}}});
  }
  metadata.tensors.push_back(tensor);
  metadata.index();
  return metadata;
}

std::vector<Tile> tiles(const Dims& shape, uint64_t itemsize, uint64_t max, const Box& box) {
  std::vector<Tile> out;
  for_each_tile(shape, itemsize, max, box, [&](const Tile& tile) { out.push_back(tile); });
  return out;
}

// ---- owners ----

TEST(StripeOwners, GiveEachRankTheSameOfALargeFile) {
  const StripeOwners owners(files_of(1, 800 * kMiB), 4);
  ASSERT_EQ(owners.stripe_bytes(), 8 * kMiB);
  std::vector<int> stripes(4, 0);
  for (uint64_t stripe = 0; stripe < 100; ++stripe) {
    ++stripes[static_cast<size_t>(owners.owner(0, stripe * 8 * kMiB + 5))];
  }
  EXPECT_THAT(stripes, Each(25));
}

TEST(StripeOwners, GiveEachRankSomethingOfManySmallFiles) {
  const StripeOwners owners(files_of(64, 100'000), 8);
  std::vector<int> files(8, 0);
  for (uint32_t file = 0; file < 64; ++file) ++files[static_cast<size_t>(owners.owner(file, 0))];
  EXPECT_THAT(files, Each(8));
}

TEST(StripeOwners, WhatRecursAtRegularDistancesHasManyOwners) {
  const StripeOwners owners(files_of(1, 8000 * kMiB), 4);
  std::vector<int> stripes(4, 0);
  for (uint64_t stripe = 0; stripe < 1000; stripe += 4) {
    ++stripes[static_cast<size_t>(owners.owner(0, stripe * 8 * kMiB))];
  }
  EXPECT_THAT(stripes, Each(testing::Gt(40)));  // of 250
}

TEST(StripeOwners, OfAHostileOffsetAreRanksToo) {
  Metadata metadata = files_of(2, 100);
  metadata.tensors[0].chunks[0].at.offset = UINT64_MAX - 3;
  const StripeOwners owners(metadata, 3);
  EXPECT_LT(owners.owner(0, UINT64_MAX), 3);
  EXPECT_GE(owners.owner(1, UINT64_MAX), 0);
}

// ---- tiles ----

TEST(Tiles, AreRowsThatFit) {
  const std::vector<Tile> all = tiles({5, 10}, 4, 80, Box::whole({5, 10}));
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].box, (Box{{0, 0}, {2, 10}}));
  EXPECT_EQ(all[1].offset, 80u);
  EXPECT_EQ(all[2].box, (Box{{4, 0}, {1, 10}}));
}

TEST(Tiles, OfARowThatDoesNotFitAreCutAlongTheNextDim) {
  const std::vector<Tile> all = tiles({2, 10}, 4, 24, Box::whole({2, 10}));
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[1].box, (Box{{0, 6}, {1, 4}}));
  EXPECT_EQ(all[1].offset, 24u);
  EXPECT_EQ(all[2].box, (Box{{1, 0}, {1, 6}}));
}

TEST(Tiles, OfAScalarIsOne) {
  const std::vector<Tile> all = tiles({}, 8, 1, Box::whole({}));
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].box, Box::whole({}));
}

TEST(Tiles, OfAnyBoxAreThoseOfTheChunkThatMeetIt) {
  std::mt19937_64 random(1);
  const auto draw = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int round = 0; round < 300; ++round) {
    Dims shape(1 + random() % 4, 1);
    Box box = Box::whole(shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      shape[d] = 1 + draw(6);
      box.offset[d] = draw(shape[d]);
      box.shape[d] = 1 + draw(shape[d] - box.offset[d]);
    }
    const uint64_t max = 1 + random() % 100;
    std::vector<Box> boxes, meeting, found;
    for (const Tile& tile : tiles(shape, 2, max, Box::whole(shape))) {
      boxes.push_back(tile.box);
      EXPECT_LE(static_cast<uint64_t>(tile.box.numel()) * 2, std::max<uint64_t>(max, 2));
      if (intersects(tile.box, box)) meeting.push_back(tile.box);
    }
    EXPECT_FALSE(check_tiling(shape, boxes));
    for (const Tile& tile : tiles(shape, 2, max, box)) found.push_back(tile.box);
    ASSERT_EQ(found, meeting) << to_string(shape) << " " << to_string(box) << " " << max;
  }
}

// ---- merged boxes ----

// The blocks of a chunk of float32.
ChunkBlocks blocks_of_shape(const Dims& shape, uint64_t block_bytes) {
  static const std::vector<uint32_t> crcs(2000);
  ChunkBlocks blocks;
  blocks.bytes = static_cast<uint64_t>(numel(shape)) * 4;
  blocks.block_bytes = block_bytes;
  blocks.expected = std::span(crcs).first(block_count(blocks.bytes, block_bytes));
  blocks.shape = shape;
  blocks.itemsize = 4;
  return blocks;
}

TEST(BlockTiles, AreWholeBlocksOfAtMost4MiB) {
  EXPECT_EQ(tile_bytes(blocks_of_shape({1 << 20}, 64u << 10), 1u << 20), 1u << 20);
  EXPECT_EQ(tile_bytes(blocks_of_shape({1 << 20}, 64u << 10), (1u << 20) + 5), 1u << 20);
  EXPECT_EQ(tile_bytes(blocks_of_shape({1 << 20}, 64u << 10), 8u << 20), 4u << 20);
  EXPECT_EQ(tile_bytes(blocks_of_shape({1 << 20}, 4u << 20), 1u << 20), 4u << 20);
}

TEST(BlockTiles, OfABoxAreItsElementsByTheTileThatTheyAreIn) {
  constexpr uint64_t kSeed = 9;
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 300; ++round) {
    const auto dims = static_cast<size_t>(1 + random() % 3);
    Dims shape(dims, 0);
    for (size_t d = 0; d < dims; ++d) shape[d] = static_cast<int64_t>(1 + random() % 40);
    Box box = Box::whole(shape);
    for (size_t d = 0; d < dims; ++d) {
      box.offset[d] = static_cast<int64_t>(random() % static_cast<uint64_t>(shape[d]));
      box.shape[d] =
          static_cast<int64_t>(1 + random() % static_cast<uint64_t>(shape[d] - box.offset[d]));
    }
    const ChunkBlocks blocks = blocks_of_shape(shape, 128);
    const uint64_t tile = 128 * (1 + random() % 4);
    const Dims strides = contiguous_strides(shape);
    int64_t elements = 0;
    std::vector<Box> parts;
    for_each_block_tile(blocks, tile, box, [&](uint64_t number, const Box& part) {
      int64_t first = 0, last = 0;
      for (size_t d = 0; d < dims; ++d) {
        first += part.offset[d] * strides[d];
        last += (part.end(d) - 1) * strides[d];
      }
      EXPECT_EQ(static_cast<uint64_t>(first) * 4 / tile, number);
      EXPECT_EQ(static_cast<uint64_t>(last) * 4 / tile, number);
      EXPECT_TRUE(box.contains(part));
      for (const Box& other : parts) EXPECT_FALSE(intersects(part, other));
      parts.push_back(part);
      elements += part.numel();
    });
    EXPECT_EQ(elements, box.numel()) << "seed " << kSeed << " round " << round;
    // The blocks of a box are those of its elements.
    std::vector<char> marked(blocks.expected.size(), 0), expected(marked);
    mark_blocks(blocks, box, marked);
    for_each_block_tile(blocks, 128, box, [&](uint64_t block, const Box&) { expected[block] = 1; });
    EXPECT_EQ(marked, expected);
  }
}

TEST(BlockVerdict, ABlockThatTwoRanksNeedCountsTwice) {
  const auto worth = [](std::vector<std::vector<char>> asked, uint64_t wanted) {
    return worth_exchanging_blocks(1u << 20, asked, wanted, 64u << 10);
  };
  EXPECT_FALSE(worth({{1, 1, 1, 1}}, 4u << 20));                    // one rank
  EXPECT_FALSE(worth({{1, 1, 0, 0}, {0, 0, 1, 1}}, 4u << 20));      // each its own
  EXPECT_TRUE(worth({{1, 1, 1, 0}, {0, 0, 1, 1}}, 4u << 20));       // rows that meet in a block
  EXPECT_TRUE(worth({{1, 1, 1, 1}, {1, 1, 1, 1}}, 4u << 20));       // columns
  EXPECT_FALSE(worth({{1, 0, 0, 0}, {0, 0, 0, 0}, {}}, 1u << 20));  // only one rank needs any
}

TEST(MergedBoxes, ThatCoverTheirBoundsAreOne) {
  const std::vector<Box> columns = {{{2, 0}, {4, 3}}, {{2, 5}, {4, 5}}, {{2, 2}, {4, 3}}};
  EXPECT_THAT(merged_boxes(columns), ElementsAre(Box{{2, 0}, {4, 10}}));
}

TEST(MergedBoxes, AreDisjointAndHoldTheSameElements) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    const Dims shape = {7, 5, 3};
    std::vector<Box> boxes;
    for (size_t i = 0; i < 1 + random() % 6; ++i) {
      Box box = Box::whole(shape);
      for (size_t d = 0; d < 3; ++d) {
        box.offset[d] = static_cast<int64_t>(random() % static_cast<uint64_t>(shape[d]));
        box.shape[d] =
            1 + static_cast<int64_t>(random() % static_cast<uint64_t>(shape[d] - box.offset[d]));
      }
      boxes.push_back(box);
    }
    const std::vector<Box> merged = merged_boxes(boxes);
    EXPECT_FALSE(find_overlap(merged));
    for (const Box& box : boxes) EXPECT_FALSE(find_uncovered(box, merged));
    for (const Box& box : merged) EXPECT_FALSE(find_uncovered(box, boxes));
  }
}

// ---- verdicts ----

std::vector<Box> columns_of(const Dims& shape, int64_t ranks) {
  std::vector<Box> boxes;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    boxes.push_back({{0, shape[1] / ranks * rank}, {shape[0], shape[1] / ranks}});
  }
  return boxes;
}

constexpr uint64_t kRequestBytes = 64u << 10;

bool worth(const Dims& shape, std::span<const Box> asked, uint64_t request_bytes = kRequestBytes) {
  return worth_exchanging(shape, 4, asked, request_bytes);
}

TEST(Verdict, OneRanksContiguousBoxIsReadByItself) {
  EXPECT_FALSE(worth({1024, 1024}, std::vector<Box>{{{0, 0}, {512, 1024}}}));
}

TEST(Verdict, RowsOfTwoRanksAreReadByThemselves) {
  EXPECT_FALSE(
      worth({1024, 1024}, std::vector<Box>{{{0, 0}, {512, 1024}}, {{512, 0}, {512, 1024}}}));
}

TEST(Verdict, WhatTwoRanksWantIsReadOnce) {
  const Box whole = Box::whole({1024, 1024});
  EXPECT_TRUE(worth({1024, 1024}, std::vector<Box>{whole, whole}));
}

TEST(Verdict, AFewCommonRowsDontCount) {
  const std::vector<Box> halo = {{{0, 0}, {520, 1024}}, {{510, 0}, {514, 1024}}};
  EXPECT_FALSE(worth({1024, 1024}, halo));
  const std::vector<Box> much = {{{0, 0}, {600, 1024}}, {{500, 0}, {524, 1024}}};
  EXPECT_TRUE(worth({1024, 1024}, much));
}

TEST(Verdict, ShortColumnsAreReadTogether) {
  for (const int64_t ranks : {2, 4, 8}) {
    EXPECT_TRUE(worth({256, 8192}, columns_of({256, 8192}, ranks))) << ranks;
  }
}

// Each rank would read all rows, because the gap between them is smaller than a page.
TEST(Verdict, ColumnsOfNarrowRowsAreReadTogether) {
  EXPECT_TRUE(worth({8192, 256}, columns_of({8192, 256}, 4)));
}

// Tiles of 256 KiB, which are worth separate reads unless reads are expensive.
TEST(Verdict, DependsOnWhatAReadCosts) {
  const Dims shape{64, 1 << 17};
  EXPECT_FALSE(worth(shape, columns_of(shape, 2), 64u << 10));
  EXPECT_TRUE(worth(shape, columns_of(shape, 2), 1u << 20));
}

TEST(Verdict, LongRunsAreReadApart) {
  EXPECT_FALSE(worth({4, 1 << 20}, columns_of({4, 1 << 20}, 2)));
}

TEST(Verdict, FragmentsOfOneRankGainNothing) {
  EXPECT_FALSE(worth({256, 8192}, std::vector<Box>{{{0, 0}, {256, 1024}}}));
}

}  // namespace tilestone::exchange_plan_test
