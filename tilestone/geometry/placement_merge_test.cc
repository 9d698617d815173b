#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/error.h"
#include "tilestone/geometry/coverage.h"
#include "tilestone/geometry/placement.h"

namespace tilestone {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Placements = std::vector<Placement>;

// Expert weights under expert parallelism inside FSDP2: each expert-parallel rank's parameter is a
// DTensor over the expert-data mesh that only knows its own experts.
struct Experts {
  int64_t edp = 1;
  int64_t ep = 1;
  Dims per_ep_rank;           // the parameter's global shape
  Placement own = Shard{0};   // over edp
  Placement rule = Shard{0};  // over ep

  Mesh checkpoint_mesh() const { return Mesh::grid({edp, ep}, {"edp", "ep"}); }

  MergedSharding at(int rank) const {
    const Mesh mesh = checkpoint_mesh();
    const Dims coordinate = *mesh.coordinate(rank);
    std::vector<int> peers;
    for (int64_t e = 0; e < edp; ++e) peers.push_back(mesh.rank_at({e, coordinate[1]}));
    const Sharding param{Mesh({edp}, peers, {"edp"}), {own}};
    const Dims inner{coordinate[0]};
    const Dims local = local_boxes(per_ep_rank, param.mesh, inner, param.placements).local_shape;
    const Sharding checkpoint{mesh, {Replicate{}, rule}};
    return merge_shardings(local, per_ep_rank, param, inner, checkpoint, coordinate);
  }

  int ranks() const { return static_cast<int>(edp * ep); }
};

void expect_tiles(const Experts& experts, const Dims& global_shape) {
  std::vector<Box> written;
  for (int rank = 0; rank < experts.ranks(); ++rank) {
    const MergedSharding merged = experts.at(rank);
    EXPECT_EQ(merged.global_shape, global_shape);
    EXPECT_EQ(merged.strides, contiguous_strides(global_shape));
    if (merged.replica_id != Dims(merged.replica_id.size(), 0)) continue;
    written.insert(written.end(), merged.held.boxes.begin(), merged.held.boxes.end());
  }
  const auto fault = check_tiling(global_shape, written);
  EXPECT_FALSE(fault) << to_string(fault->where);
}

TEST(PlacementMerge, RankZeroHoldsItsOwnExpertsNotRankOnes) {
  // One name and one local description on both ranks: only the merged boxes tell them apart.
  for (int64_t ep : {2, 4}) {
    const Experts experts{.edp = 1, .ep = ep, .per_ep_rank = {3, 8}};
    for (int rank = 0; rank < experts.ranks(); ++rank) {
      EXPECT_THAT(experts.at(rank).held.boxes, ElementsAre(Box{{rank * 3, 0}, {3, 8}}));
    }
    expect_tiles(experts, {3 * ep, 8});
  }
}

TEST(PlacementMerge, TheParametersShardLiesInsideTheCheckpoints) {
  // The mesh has edp outside ep, yet expert rank 1 holds experts 4..8, cut in two by edp.
  const Experts experts{.edp = 2, .ep = 2, .per_ep_rank = {4, 8}};
  EXPECT_THAT(experts.at(1).held.boxes, ElementsAre(Box{{4, 0}, {2, 8}}));  // edp 0, ep 1
  EXPECT_THAT(experts.at(2).held.boxes, ElementsAre(Box{{2, 0}, {2, 8}}));  // edp 1, ep 0
  EXPECT_THAT(experts.at(3).held.boxes, ElementsAre(Box{{6, 0}, {2, 8}}));
  EXPECT_EQ(experts.at(3).replica_id, Dims());
}

TEST(PlacementMerge, EveryElementHasOneMainReplicaAtExpertParallelTwoAndFour) {
  for (int64_t ep : {2, 4}) {
    for (int64_t edp : {1, 2, 3}) {
      for (const Placement& own : Placements{Shard{0}, Shard{1}, Replicate{}, StridedShard{0, 2}}) {
        SCOPED_TRACE(to_string(own) + " ep " + std::to_string(ep) + " edp " + std::to_string(edp));
        // Uneven and empty shards over edp: 5 = 2 + 2 + 1, 1 = 1 + 0 + 0.
        expect_tiles({.edp = edp, .ep = ep, .per_ep_rank = {5, 7}, .own = own}, {5 * ep, 7});
        expect_tiles({.edp = edp, .ep = ep, .per_ep_rank = {1, 7}, .own = own}, {ep, 7});
        expect_tiles({.edp = edp, .ep = ep, .per_ep_rank = {5, 7}, .own = own, .rule = Shard{-1}},
                     {5, 7 * ep});
      }
    }
  }
}

TEST(PlacementMerge, RepeatedCheckpointShardsComposeOuterToInner) {
  const Mesh mesh = Mesh::grid({2, 3}, {"ep", "etp"});
  const Sharding param{Mesh::grid({}), {}};
  const Sharding checkpoint{mesh, {Shard{0}, Shard{0}}};
  const auto merged = merge_shardings({4}, {4}, param, {}, checkpoint, {1, 2});
  EXPECT_EQ(merged.global_shape, Dims{24});
  EXPECT_THAT(merged.held.boxes, ElementsAre(Box{{20}, {4}}));  // rank 1 * 3 + 2 of 6
}

TEST(PlacementMerge, AllReplicateKeepsTheParametersShardingEmptyShardsIncluded) {
  const Sharding param{Mesh::grid({4}, {"dp"}), {Shard{0}}};
  const Sharding checkpoint{Mesh::grid({4, 2}, {"dp", "tp"}), {Replicate{}, Replicate{}}};
  const auto full = merge_shardings({2, 3}, {5, 3}, param, {1}, checkpoint, {1, 0});
  EXPECT_EQ(full.global_shape, (Dims{5, 3}));
  EXPECT_THAT(full.held.boxes, ElementsAre(Box{{2, 0}, {2, 3}}));
  EXPECT_EQ(full.replica_id, Dims{0});  // along tp; dp shards it
  const auto empty = merge_shardings({0, 3}, {5, 3}, param, {3}, checkpoint, {3, 1});
  EXPECT_EQ(empty.global_shape, (Dims{5, 3}));
  EXPECT_THAT(empty.held.boxes, ElementsAre(Box{{5, 0}, {0, 3}}));
  EXPECT_EQ(empty.replica_id, Dims{1});
}

TEST(PlacementMerge, AMeshDimThatBothNameCountsOnce) {
  // The parameter is a DTensor over both dims, as it is where one mesh serves both.
  const Mesh mesh = Mesh::grid({2, 2}, {"edp", "ep"});
  const Sharding param{mesh, {StridedShard{0, 2}, Shard{0}}};
  const Sharding checkpoint{mesh, {Replicate{}, Shard{0}}};
  const auto merged = merge_shardings({2, 3}, {8, 3}, param, {1, 0}, checkpoint, {1, 0});
  EXPECT_EQ(merged.global_shape, (Dims{8, 3}));
  EXPECT_THAT(merged.held.boxes, ElementsAre(Box{{2, 0}, {2, 3}}));
  EXPECT_EQ(merged.replica_id, Dims());
}

TEST(PlacementMerge, ReplicaIdHasTheDimsOverWhichNeitherShards) {
  const Sharding param{Mesh::grid({2, 2}, {"replicate", "edp"}), {Replicate{}, Shard{0}}};
  const Sharding checkpoint{Mesh::grid({2, 2, 2}, {"edp", "ep", "etp"}),
                            {Replicate{}, Shard{0}, Replicate{}}};
  const auto merged = merge_shardings({2}, {4}, param, {1, 0}, checkpoint, {0, 1, 1});
  EXPECT_EQ(merged.replica_id, (Dims{1, 1}));  // etp of the checkpoint, then replicate
}

void expect_refused(const Dims& local, const Sharding& param, const Dims& at,
                    const Placements& rules, const Dims& checkpoint_at,
                    const std::string& problem) {
  try {
    merge_shardings(local, {4, 4}, param, at, {Mesh::grid({2, 2}, {"edp", "ep"}), rules},
                    checkpoint_at);
    ADD_FAILURE() << "accepted: " << problem;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(e.message(), HasSubstr(problem));
  }
}

TEST(PlacementMerge, ContradictionsAreRefused) {
  const Sharding edp{Mesh::grid({2}, {"edp"}), {Shard{0}}};
  const Sharding ep{Mesh::grid({2}, {"ep"}), {Shard{1}}};
  const Sharding wide{Mesh::grid({4}, {"ep"}), {Shard{0}}};
  const Placements rules{Replicate{}, Shard{0}};
  expect_refused({4, 4}, edp, {0}, rules, {0, 0}, "the local tensor has shape [4, 4]");
  expect_refused({2, 4}, edp, {0}, rules, {1, 0}, "'edp' differs in size or coordinate");
  expect_refused({1, 4}, wide, {0}, rules, {0, 0}, "'ep' differs in size or coordinate");
  expect_refused({4, 2}, ep, {0}, rules, {0, 0}, "the parameter is Shard(1) but the checkpoint is");
  expect_refused({2, 4}, edp, {0}, {Replicate{}, StridedShard{0, 2}}, {0, 0}, "must be Shard");
  expect_refused({2, 4}, edp, {0}, {Replicate{}, Partial{}}, {0, 0}, "must be Shard");
  expect_refused({2, 4}, edp, {0}, {Shard{0}}, {0, 0}, "expected one placement");
  expect_refused({2, 4}, edp, {0}, {Replicate{}, Shard{2}}, {0, 0}, "Shard(2) names a dim");
}

}  // namespace
}  // namespace tilestone
