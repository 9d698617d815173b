#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/error_testing.h"
#include "tilestone/geometry/coverage.h"
#include "tilestone/geometry/placement.h"

namespace tilestone::placement_merge_test {

using testing::ElementsAre;
using testing::IsEmpty;
using Placements = std::vector<Placement>;

const Sharding kPlain{Mesh({}, {0}), {}};  // a plain tensor of rank 0

// Expert weights under expert parallelism inside FSDP2. Each expert-parallel rank's parameter is a
// DTensor over the expert-data mesh, which only describes its own experts.
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
    const Sharding param{Mesh({edp}, peers, {"fsdp"}), {own}};
    const Dims local =
        local_boxes(per_ep_rank, param.mesh, {coordinate[0]}, param.placements).local_shape;
    return merge_shardings(local, per_ep_rank, param, {mesh, {Replicate{}, rule}}, rank);
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
  // Both ranks have the same name and local description. Only the merged boxes distinguish them.
  for (int64_t ep : {2, 4}) {
    const Experts experts{.edp = 1, .ep = ep, .per_ep_rank = {3, 8}};
    for (int rank = 0; rank < experts.ranks(); ++rank) {
      EXPECT_THAT(experts.at(rank).held.boxes, ElementsAre(Box{{rank * 3, 0}, {3, 8}}));
      EXPECT_THAT(experts.at(rank).holders, ElementsAre(rank));
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
  EXPECT_EQ(experts.at(3).replica_id, Dims{0});
  EXPECT_THAT(experts.at(3).holders, ElementsAre(3));
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
  const Sharding checkpoint{Mesh::grid({2, 3}, {"ep", "etp"}), {Shard{0}, Shard{0}}};
  const auto merged = merge_shardings({4}, {4}, {Mesh({}, {5}), {}}, checkpoint, 5);
  EXPECT_EQ(merged.global_shape, Dims{24});
  EXPECT_THAT(merged.held.boxes, ElementsAre(Box{{20}, {4}}));  // rank 1 * 3 + 2 of 6
}

TEST(PlacementMerge, AllReplicateKeepsTheParametersShardingEmptyShardsIncluded) {
  const Sharding checkpoint{Mesh::grid({4, 2}, {"dp", "tp"}), {Replicate{}, Replicate{}}};
  const Sharding param{Mesh({4}, {0, 2, 4, 6}, {"dp"}), {Shard{0}}};  // of tp rank 0
  const Sharding other{Mesh({4}, {1, 3, 5, 7}, {"dp"}), {Shard{0}}};  // of tp rank 1
  const auto full = merge_shardings({2, 3}, {5, 3}, param, checkpoint, 2);
  EXPECT_EQ(full.global_shape, (Dims{5, 3}));
  EXPECT_THAT(full.held.boxes, ElementsAre(Box{{2, 0}, {2, 3}}));
  EXPECT_EQ(full.replica_id, Dims{0});
  EXPECT_THAT(full.holders, ElementsAre(2, 3));  // tp replicates, dp shards
  const auto empty = merge_shardings({0, 3}, {5, 3}, other, checkpoint, 7);
  EXPECT_EQ(empty.global_shape, (Dims{5, 3}));
  EXPECT_THAT(empty.held.boxes, ElementsAre(Box{{5, 0}, {0, 3}}));
  EXPECT_EQ(empty.replica_id, Dims{1});
}

TEST(PlacementMerge, RanksThatBothShardCountOnce) {
  // The parameter is a DTensor over both dims, as it is when one mesh serves both.
  const Mesh mesh = Mesh::grid({2, 2}, {"edp", "ep"});
  const Sharding param{mesh, {StridedShard{0, 2}, Shard{0}}};
  const auto merged = merge_shardings({2, 3}, {8, 3}, param, {mesh, {Replicate{}, Shard{0}}}, 2);
  EXPECT_EQ(merged.global_shape, (Dims{8, 3}));
  EXPECT_THAT(merged.held.boxes, ElementsAre(Box{{2, 0}, {2, 3}}));
  EXPECT_THAT(merged.holders, ElementsAre(2));
}

TEST(PlacementMerge, AFlattenedMeshDimKnowsTheRanksOfBoth) {
  // FSDP2 over all of dp and cp. In the checkpoint's mesh they are separate dims, with tp between
  // them.
  const Sharding checkpoint{Mesh::grid({2, 2, 2}, {"dp", "tp", "cp"}),
                            {Replicate{}, Shard{1}, Replicate{}}};
  const Sharding param{Mesh({4}, {2, 3, 6, 7}, {"dp_cp"}), {Shard{0}}};
  const auto merged = merge_shardings({1, 3}, {4, 3}, param, checkpoint, 6);
  EXPECT_EQ(merged.global_shape, (Dims{4, 6}));
  EXPECT_THAT(merged.held.boxes, ElementsAre(Box{{2, 3}, {1, 3}}));
  EXPECT_EQ(merged.replica_id, Dims{0});
  EXPECT_THAT(merged.holders, ElementsAre(6));
}

TEST(PlacementMerge, TheCheckpointIsRightWhereTheParameterCallsShardsReplicas) {
  // A wrapper that flattened edp and ep treats all four ranks as replicas of one another.
  const Sharding checkpoint{Mesh::grid({2, 2}, {"edp", "ep"}), {Replicate{}, Shard{0}}};
  const Sharding param{Mesh::grid({4}, {"dp"}), {Replicate{}}};
  const auto first = merge_shardings({3}, {3}, param, checkpoint, 1);
  EXPECT_THAT(first.held.boxes, ElementsAre(Box{{3}, {3}}));
  EXPECT_EQ(first.replica_id, (Dims{0, 0}));
  EXPECT_THAT(first.holders, ElementsAre(1, 3));
  EXPECT_EQ(merge_shardings({3}, {3}, param, checkpoint, 3).replica_id, (Dims{0, 1}));
}

TEST(PlacementMerge, CopiesOverAMeshThatCrossesTheParametersHaveOneMainReplica) {
  // Dense: dp 4 outside tp 2; experts: edp 2 outside ep 4. A dense parameter under the expert mesh.
  const Sharding checkpoint{Mesh::grid({2, 4}, {"edp", "ep"}), {Replicate{}, Replicate{}}};
  const Sharding param{Mesh({4}, {0, 2, 4, 6}, {"dp"}), {Shard{0}}};
  const Sharding other{Mesh({4}, {1, 3, 5, 7}, {"dp"}), {Shard{0}}};
  EXPECT_EQ(merge_shardings({1}, {4}, param, checkpoint, 4).replica_id, Dims{0});
  EXPECT_EQ(merge_shardings({1}, {4}, other, checkpoint, 5).replica_id, Dims{1});
  // The holders are unknown: nothing says how tp's other rank divides its copy.
  EXPECT_THAT(merge_shardings({1}, {4}, param, checkpoint, 4).holders, IsEmpty());
}

TEST(PlacementMerge, ReplicasAreCountedOverTheParametersDimsAndTheCheckpoints) {
  const Sharding param{Mesh({2, 2}, {5, 105, 7, 107}, {"edp", "replicate"}),
                       {Shard{0}, Replicate{}}};
  const Sharding checkpoint{Mesh::grid({2, 2, 2}, {"ep", "edp", "etp"}),
                            {Shard{0}, Replicate{}, Replicate{}}};
  const auto merged = merge_shardings({2}, {4}, param, checkpoint, 5);
  EXPECT_EQ(merged.global_shape, Dims{8});
  EXPECT_THAT(merged.held.boxes, ElementsAre(Box{{4}, {2}}));
  EXPECT_EQ(merged.replica_id, (Dims{1, 0}));
  EXPECT_THAT(merged.holders, IsEmpty());  // rank 105's own peers over etp are in neither mesh
}

void expect_refused(const Dims& local, const Sharding& param, const Sharding& checkpoint,
                    const std::vector<std::string>& facts, int rank = 0) {
  const Error error = error_of([&] { merge_shardings(local, {4, 4}, param, checkpoint, rank); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message(), MentionsAll(facts));
}

TEST(PlacementMerge, BadArgumentsAreRefused) {
  const Mesh mesh = Mesh::grid({2, 2}, {"edp", "ep"});
  const Sharding edp{Mesh({2}, {0, 2}, {"edp"}), {Shard{0}}};
  const Sharding rules{mesh, {Replicate{}, Shard{0}}};
  expect_refused({4, 4}, edp, rules, {"local tensor", "[4, 4]"});
  expect_refused({2, 4}, edp, {mesh, {Replicate{}, StridedShard{0, 2}}}, {"must be Shard"});
  expect_refused({2, 4}, edp, {mesh, {Replicate{}, Partial{}}}, {"must be Shard"});
  expect_refused({2, 4}, edp, {mesh, {Shard{0}}}, {"placement", "2 mesh dims"});
  expect_refused({2, 4}, edp, {mesh, {Replicate{}, Shard{2}}}, {"Shard(2)"});
  expect_refused({2, 4}, edp, rules, {"rank 1", "parameter's mesh"}, 1);
  expect_refused({4, 4}, {Mesh({}, {9}), {}}, rules, {"rank 9", "checkpoint's mesh"}, 9);
  expect_refused({4, 4}, {Mesh({}, {0}), {Partial{}}}, rules, {"placement", "0"});
}

TEST(PlacementMerge, MeshesThatContradictOneAnotherAreRefusedByTheNamesOfTheirDims) {
  const Mesh mesh = Mesh::grid({2, 2}, {"edp", "ep"});
  const Sharding rules{mesh, {Replicate{}, Shard{0}}};
  const Sharding other_dim{Mesh({2}, {0, 1}, {"ep"}), {Shard{1}}};
  expect_refused({4, 2}, other_dim, rules,
                 {"'ep'", "checkpoint", "Shard(0)", "'ep'", "parameter", "Shard(1)"});
  const Sharding wide{Mesh({2, 2}, {0, 1, 4, 5}, {"replicate", "shard"}), {Shard{0}, Replicate{}}};
  expect_refused({2, 4}, wide, {Mesh({4}, {0, 4, 8, 12}, {"ep"}), {Shard{0}}},
                 {"'replicate'", "parameter", "Shard(0)", "only some"});
  const Sharding across{Mesh({2}, {0, 3}, {"dp"}), {Shard{0}}};
  expect_refused({2, 4}, across, rules, {"'dp'", "parameter", "Shard(0)", "another shard"});
  const Sharding half{Mesh({4}, {0, 1, 8, 9}, {"dp"}), {Replicate{}}};
  expect_refused({4, 4}, half, rules, {"not in the checkpoint's mesh"});
}

TEST(PlacementMerge, APlainTensorIsWholeOnEachRankOfTheMesh) {
  const Sharding checkpoint{Mesh::grid({2, 2}, {"edp", "ep"}), {Replicate{}, Replicate{}}};
  const auto merged = merge_shardings({4, 4}, {4, 4}, kPlain, checkpoint, 0);
  EXPECT_EQ(merged.replica_id, Dims{0});
  EXPECT_THAT(merged.holders, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(merge_shardings({4, 4}, {4, 4}, {Mesh({}, {2}), {}}, checkpoint, 2).replica_id,
            Dims{2});
}

}  // namespace tilestone::placement_merge_test
