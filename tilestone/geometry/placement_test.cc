#include "tilestone/geometry/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "tilestone/base/error.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone::placement_test {

using testing::ElementsAre;
using testing::HasSubstr;
using Placements = std::vector<Placement>;

LocalBoxes on_line(const Dims& shape, int64_t ranks, int64_t rank, const Placement& placement) {
  return local_boxes(shape, Mesh::grid({ranks}), {rank}, Placements{placement});
}

TEST(Placement, ShardSplitsAsTorchChunkDoes) {
  // 10 over 4: chunks of 3, the last one shorter; 5 over 4: chunks of 2, the last one empty.
  EXPECT_THAT(on_line({10}, 4, 0, Shard{0}).boxes, ElementsAre(Box{{0}, {3}}));
  EXPECT_THAT(on_line({10}, 4, 3, Shard{0}).boxes, ElementsAre(Box{{9}, {1}}));
  EXPECT_THAT(on_line({5}, 4, 2, Shard{0}).boxes, ElementsAre(Box{{4}, {1}}));
}

TEST(Placement, AnEmptyShardLiesAtTheDimsEnd) {
  const LocalBoxes held = on_line({5, 7}, 4, 3, Shard{0});
  EXPECT_EQ(held.local_shape, (Dims{0, 7}));
  EXPECT_THAT(held.boxes, ElementsAre(Box{{5, 0}, {0, 7}}));
  EXPECT_THAT(held.locals, ElementsAre(Box{{0, 0}, {0, 7}}));
}

TEST(Placement, AZeroSizedDimCanBeSharded) {
  EXPECT_THAT(on_line({0, 4}, 2, 1, Shard{0}).boxes, ElementsAre(Box{{0, 0}, {0, 4}}));
}

TEST(Placement, AnEmptyBoxHasTheLocalShapeThoughItsRowsLieApart) {
  const LocalBoxes held = on_line({8, 0}, 2, 1, StridedShard{0, 2});
  EXPECT_THAT(held.boxes, ElementsAre(Box{{2, 0}, {4, 0}}));
  EXPECT_THAT(held.locals, ElementsAre(Box{{0, 0}, {4, 0}}));
}

TEST(Placement, NegativeDimsCountFromTheEnd) {
  EXPECT_THAT(on_line({4, 6}, 2, 1, Shard{-1}).boxes, ElementsAre(Box{{0, 3}, {4, 3}}));
}

TEST(Placement, AScalarIsReplicated) {
  const LocalBoxes held = on_line({}, 4, 2, Replicate{});
  EXPECT_EQ(held.local_shape, Dims());
  EXPECT_THAT(held.boxes, ElementsAre(Box{}));
}

TEST(Placement, RepeatedShardsSplitOuterToInner) {
  const Mesh mesh = Mesh::grid({2, 2});
  const Placements placements{Shard{1}, Shard{1}};
  const Dims shape{2, 5};  // 3 and 2 columns, then 2 and 1, 1 and 1
  EXPECT_THAT(local_boxes(shape, mesh, {0, 1}, placements).boxes, ElementsAre(Box{{0, 2}, {2, 1}}));
  EXPECT_THAT(local_boxes(shape, mesh, {1, 0}, placements).boxes, ElementsAre(Box{{0, 3}, {2, 1}}));
}

TEST(Placement, StridedShardUnderShardIsOneBox) {
  // FSDP2 over TP on 2 x 2 ranks: tensor parallelism cuts first, so (dp 0, tp 1) holds rows 4 and
  // 5.
  const Mesh mesh = Mesh::grid({2, 2}, {"dp", "tp"});
  const Placements placements{StridedShard{0, 2}, Shard{0}};
  EXPECT_THAT(local_boxes({8, 8}, mesh, {0, 1}, placements).boxes,
              ElementsAre(Box{{4, 0}, {2, 8}}));
  EXPECT_THAT(local_boxes({8, 8}, mesh, {1, 0}, placements).boxes,
              ElementsAre(Box{{2, 0}, {2, 8}}));
}

TEST(Placement, ALoneStridedShardIsSeveralBoxesWithTheirPlaceInTheLocalTensor) {
  const LocalBoxes held = on_line({8, 3}, 2, 1, StridedShard{0, 2});
  EXPECT_EQ(held.local_shape, (Dims{4, 3}));
  EXPECT_THAT(held.boxes, ElementsAre(Box{{2, 0}, {2, 3}}, Box{{6, 0}, {2, 3}}));
  EXPECT_THAT(held.locals, ElementsAre(Box{{0, 0}, {2, 3}}, Box{{2, 0}, {2, 3}}));
}

TEST(Placement, AdjoiningPartsOfAStridedShardAreOneBox) {
  EXPECT_THAT(on_line({8}, 1, 0, StridedShard{0, 4}).boxes, ElementsAre(Box{{0}, {8}}));
}

TEST(Placement, ASplitBeyondTheDimIsAsManyPartsAsElements) {
  EXPECT_THAT(on_line({3}, 2, 0, StridedShard{0, INT64_MAX}).boxes, ElementsAre(Box{{0}, {3}}));
  EXPECT_EQ(on_line({3}, 2, 1, StridedShard{0, INT64_MAX}).local_shape, Dims{0});
}

TEST(Placement, UnevenFsdpOverTensorParallelismHoldsWhatItsLocalShapeSays) {
  // 9 rows: tensor parallelism cuts 5 + 4, and FSDP2 over 4 ranks cuts these into 2 + 2 + 1 + 0 and
  // 1 + 1 + 1 + 1. The last FSDP rank's row 8 belongs to tensor-parallel rank 1. Read outer to
  // inner, it would belong to rank 0.
  const Mesh mesh = Mesh::grid({4, 2}, {"dp", "tp"});
  const Placements placements{StridedShard{0, 2}, Shard{0}};
  EXPECT_THAT(local_boxes({9, 2}, mesh, {3, 0}, placements).boxes,
              ElementsAre(Box{{8, 0}, {1, 2}}));
  EXPECT_THAT(held_boxes({9, 2}, mesh, {3, 0}, placements, {0, 2}).boxes,
              ElementsAre(Box{{9, 0}, {0, 2}}));
  EXPECT_THAT(held_boxes({9, 2}, mesh, {3, 1}, placements, {1, 2}).boxes,
              ElementsAre(Box{{8, 0}, {1, 2}}));
  EXPECT_THAT(held_boxes({9, 2}, mesh, {3, 0}, placements, {1, 2}).boxes,
              ElementsAre(Box{{8, 0}, {1, 2}}));
}

TEST(Placement, AnEmptyLocalTensorOfAnyShapeFitsWhereNothingIsHeld) {
  const Mesh mesh = Mesh::grid({4, 3}, {"dp", "tp"});
  const Placements placements{Shard{0}, Shard{1}};
  EXPECT_THAT(held_boxes({24, 4}, mesh, {0, 2}, placements, {0, 0}).boxes,
              ElementsAre(Box{{0, 4}, {6, 0}}));
  EXPECT_THROW(held_boxes({24, 4}, mesh, {0, 1}, placements, {0, 0}), Error);
}

TEST(Placement, ALocalShapeThatFitsNoReadingOrTwoDifferentOnesIsRefused) {
  const auto refusal = [](const Dims& shape, const Mesh& mesh, const Dims& at, const Dims& local) {
    try {
      held_boxes(shape, mesh, at, Placements{StridedShard{0, mesh.shape()[1]}, Shard{0}}, local);
    } catch (const Error& e) {
      return e.code();
    }
    return ErrorCode{};
  };
  EXPECT_EQ(refusal({9}, Mesh::grid({4, 2}), {0, 1}, {7}), ErrorCode::kInvalidArgument);
  // 27 rows over tp 4 are 7 + 7 + 7 + 6. The last of 3 FSDP ranks has one row of each of the first
  // three parts: 6, 13 and 20. Read outer to inner, it would have chunks of [6, 13, 20, 25, 26] and
  // so row 26.
  EXPECT_EQ(refusal({27}, Mesh::grid({3, 4}), {2, 2}, {1}), ErrorCode::kUnsupported);
}

TEST(Placement, BothReadingsOfStridedShardsAgreeOnEvenSplits) {
  // Hybrid FSDP over two tensor-parallel dims: one StridedShard over another.
  const Mesh mesh = Mesh::grid({2, 3, 2, 2});
  const Placements placements{StridedShard{0, 4}, Replicate{}, StridedShard{0, 2}, Shard{0}};
  for (int rank : mesh.ranks()) {
    const Dims at = *mesh.coordinate(rank);
    EXPECT_EQ(held_boxes({16}, mesh, at, placements, {2}).boxes,
              local_boxes({16}, mesh, at, placements).boxes);
  }
}

void expect_refused(const Dims& shape, const Mesh& mesh, const Dims& at, const Placements& all,
                    const std::string& problem) {
  try {
    local_boxes(shape, mesh, at, all);
    ADD_FAILURE() << "accepted: " << problem;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(e.message(), HasSubstr(problem));
  }
}

TEST(Placement, BadArgumentsAreRefused) {
  const Mesh mesh = Mesh::grid({2});
  expect_refused({4}, mesh, {0}, {Partial{}}, "Partial");
  expect_refused({4}, mesh, {0}, {Shard{1}}, "Shard(1) names a dim that a tensor of 1 dims");
  expect_refused({4}, mesh, {0}, {Shard{-2}}, "Shard(-2)");
  expect_refused({}, mesh, {0}, {Shard{0}}, "a tensor of 0 dims");
  expect_refused({4}, mesh, {0}, {StridedShard{0, 0}}, "split must be positive");
  expect_refused({4}, mesh, {0}, {Shard{0}, Shard{0}}, "expected one placement");
  expect_refused({4}, mesh, {2}, {Shard{0}}, "lies outside");
  expect_refused({-4}, mesh, {0}, {Shard{0}}, "negative dim");
}

TEST(Placement, ReplicaIdIsTheCoordinateAlongReplicateDims) {
  const Mesh mesh = Mesh::grid({2, 3, 2});
  EXPECT_EQ(replica_id(mesh, {1, 2, 0}, Placements{Replicate{}, Shard{0}, Replicate{}}),
            (Dims{1, 0}));
  EXPECT_EQ(replica_id(mesh, {1, 2, 0}, Placements{Shard{0}, Shard{0}, Shard{0}}), Dims());
}

Placements random_placements(std::mt19937_64& random, size_t mesh_dims, size_t rank) {
  Placements placements;
  for (size_t m = 0; m < mesh_dims; ++m) {
    const uint64_t kind = rank == 0 ? 0 : random() % 3;
    const auto dim = rank == 0 ? int64_t{0} : static_cast<int64_t>(random() % rank);
    if (kind == 0) placements.push_back(Replicate{});
    if (kind == 1) placements.push_back(Shard{dim});
    if (kind == 2) placements.push_back(StridedShard{dim, 1 + static_cast<int64_t>(random() % 4)});
  }
  return placements;
}

Dims random_dims(std::mt19937_64& random, size_t most_dims, int64_t least, int64_t most) {
  Dims dims(random() % (most_dims + 1), 0);
  for (int64_t& n : dims) n = least + static_cast<int64_t>(random() % (most - least + 1));
  return dims;
}

void check_local(const LocalBoxes& held) {
  ASSERT_EQ(held.boxes.size(), held.locals.size());
  for (size_t i = 0; i < held.boxes.size(); ++i) {
    ASSERT_EQ(held.boxes[i].shape, held.locals[i].shape);
  }
  if (numel(held.local_shape) > 0) {
    ASSERT_FALSE(check_tiling(held.local_shape, held.locals));
  }
}

TEST(Placement, MainReplicasTileTheTensorAndHoldersShareTheirBoxes) {
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    std::mt19937_64 random(seed);
    const Mesh mesh = Mesh::grid(random_dims(random, 3, 1, 4));
    const Dims shape = random_dims(random, 3, 0, 9);
    const Placements placements = random_placements(random, mesh.dims(), shape.size());
    SCOPED_TRACE("seed " + std::to_string(seed) + ", shape " + to_string(shape) + ", mesh " +
                 to_string(mesh.shape()));
    std::vector<Box> written;
    for (int rank : mesh.ranks()) {
      const Dims at = *mesh.coordinate(rank);
      const LocalBoxes held = local_boxes(shape, mesh, at, placements);
      ASSERT_NO_FATAL_FAILURE(check_local(held));
      const auto holders = replica_holders(mesh, at, placements);
      ASSERT_TRUE(std::is_sorted(holders.begin(), holders.end()));
      ASSERT_TRUE(std::binary_search(holders.begin(), holders.end(), rank));
      int mains = 0;
      for (int holder : holders) {
        const Dims there = *mesh.coordinate(holder);
        ASSERT_EQ(local_boxes(shape, mesh, there, placements).boxes, held.boxes);
        const Dims id = replica_id(mesh, there, placements);
        mains += id == Dims(id.size(), 0) ? 1 : 0;
      }
      ASSERT_EQ(mains, 1);
      if (holders.front() == rank) {
        written.insert(written.end(), held.boxes.begin(), held.boxes.end());
      }
    }
    const auto fault = check_tiling(shape, written);
    ASSERT_FALSE(fault) << to_string(fault->where);
  }
}

TEST(Placement, HoldersAreGlobalRanksInAscendingOrder) {
  const Mesh mesh({2, 2}, {9, 3, 1, 7});
  EXPECT_THAT(replica_holders(mesh, {0, 1}, Placements{Replicate{}, Shard{0}}), ElementsAre(3, 7));
  EXPECT_THAT(replica_holders(mesh, {0, 1}, Placements{Replicate{}, Replicate{}}),
              ElementsAre(1, 3, 7, 9));
}

}  // namespace tilestone::placement_test
