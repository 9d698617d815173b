#include "tilestone/state/sharded.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <numeric>

#include "tilestone/base/error.h"

namespace tilestone::sharded_test {

using testing::ElementsAre;
using testing::HasSubstr;

// The error's message. Every error must name the key.
template <typename Body>
std::string refusal(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.key(), "w");
    return error.message();
  }
  return "no error";
}

TensorView data(Dims shape) { return TensorView::allocate(DType::kFloat32, std::move(shape)); }

ShardedTensor grid(Dims local, std::initializer_list<RankOffset> offsets, int64_t prepended = 0) {
  return ShardedTensor::from_rank_offsets("w", data(std::move(local)), offsets, {}, prepended);
}

TEST(ShardedTensor, RankOffsetsGiveTheCellOfAGrid) {
  const ShardedTensor t = grid({4, 8}, {{1, 2, 3}});
  EXPECT_EQ(t.global_shape, (Dims{4, 24}));
  EXPECT_EQ(to_string(t.box), "[0:4, 16:24]");
  ASSERT_EQ(t.pieces.size(), 1u);
  EXPECT_EQ(t.pieces[0].box, t.box);
  EXPECT_TRUE(t.is_regular_grid());
}

TEST(ShardedTensor, PrependedAxesCountAndHaveSizeOne) {
  const ShardedTensor t = grid({4}, {{0, 1, 5}, {2, 0, 2}}, 2);
  EXPECT_EQ(t.global_shape, (Dims{5, 1, 8}));
  EXPECT_EQ(to_string(t.box), "[1:2, 0:1, 0:4]");
  EXPECT_EQ(t.pieces[0].data.shape, (Dims{4}));
}

TEST(ShardedTensor, ScalarsAreOneElement) {
  const ShardedTensor t = grid({}, {});
  EXPECT_EQ(t.global_shape, Dims());
  ASSERT_EQ(t.pieces.size(), 1u);
  EXPECT_EQ(t.pieces[0].box.numel(), 1);
}

TEST(ShardedTensor, BadRankOffsetsAreRefusedWithKeyArgumentAndValue) {
  EXPECT_EQ(refusal([] { grid({4}, {{-1, 0, 2}}); }), "rank_offsets: axis -1 is negative");
  EXPECT_EQ(refusal([] { grid({4}, {{2, 0, 2}}, 1); }),
            "rank_offsets: axis 2 is out of range for a tensor of 2 dims, prepended axes included");
  EXPECT_EQ(refusal([] { grid({4}, {{0, 0, 2}, {0, 1, 2}}); }),
            "rank_offsets: axis 0 is named twice");
  EXPECT_EQ(refusal([] { grid({4}, {{0, 2, 2}}); }),
            "rank_offsets: rank 2 of axis 0 is not less than fragments 2");
  EXPECT_EQ(refusal([] { grid({4}, {{0, -1, 2}}); }),
            "rank_offsets: rank -1 of axis 0 is negative");
  EXPECT_EQ(refusal([] { grid({4}, {{0, 0, 0}}); }),
            "rank_offsets: fragments 0 of axis 0 is less than 1");
  EXPECT_EQ(refusal([] { grid({4}, {}, -1); }), "prepend_axis_num -1 is not between 0 and 64");
  EXPECT_EQ(refusal([] { grid({4}, {}, 1'000'000'000); }),
            "prepend_axis_num 1000000000 is not between 0 and 64");
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(refusal([&] { grid({4}, {{0, 1, most}}); }), HasSubstr("global size of an axis"));
  EXPECT_THAT(refusal([&] { grid({1, 1}, {{0, 0, most}, {1, 0, 2}}); }),
              HasSubstr("more than 2^63 - 1 elements"));
  EXPECT_EQ(refusal([] { ShardedTensor::from_rank_offsets("w", data({4}), {}, {0, -2}); }),
            "replica_id [0, -2] has a negative component");
  TensorView broken = data({4});
  broken.strides = {};
  EXPECT_EQ(refusal([&] { ShardedTensor::from_rank_offsets("w", broken, {}); }),
            "data: strides [] don't have as many dims as shape [4]");
}

TEST(ShardedTensor, EmptyShardsHoldNoPieces) {
  const ShardedTensor t = ShardedTensor::from_box("w", data({0, 4}), {8, 4}, {{8, 0}, {0, 4}});
  EXPECT_TRUE(t.pieces.empty());
  EXPECT_TRUE(t.is_regular_grid());
}

TEST(ShardedTensor, ATensorWithoutElementsHasOneEmptyPieceThatIsTheWhole) {
  ASSERT_EQ(grid({0, 4}, {{1, 1, 2}}).pieces.size(), 1u);
  EXPECT_TRUE(grid({0, 4}, {}).pieces[0].box.empty());
  const RankOffset none[] = {{0, 0, 1}};
  const ShardedTensor flat =
      ShardedTensor::from_rank_offsets_flat("w", data({0}), {0, 4}, {0, 0}, none);
  ASSERT_EQ(flat.pieces.size(), 1u);
  EXPECT_EQ(flat.pieces[0].box.shape, (Dims{0, 4}));
  const Placement placements[] = {Shard{0}};
  const ShardedTensor placed =
      ShardedTensor::from_placements("w", data({0, 4}), {0, 4}, Mesh::grid({2}), placements, 1);
  ASSERT_EQ(placed.pieces.size(), 1u);
  EXPECT_EQ(placed.pieces[0].box, Box::whole({0, 4}));
  EXPECT_THAT(placed.holders, ElementsAre(0, 1));
}

TEST(ShardedTensor, FlatRangesBecomeBoxesWithTheirPartOfTheData) {
  TensorView flat = data({13});
  std::vector<float> values(13);
  std::iota(values.begin(), values.end(), 0.0f);
  std::memcpy(flat.data, values.data(), 13 * sizeof(float));
  const RankOffset offsets[] = {{0, 2, 3}, {1, 1, 2}};
  // Elements [3, 16) of a local 5 x 4 tensor: the end of row 0, rows 1 to 3.
  const ShardedTensor t = ShardedTensor::from_rank_offsets_flat("w", flat, {5, 4}, {3, 16},
                                                                std::span(offsets).first(2));
  EXPECT_EQ(t.global_shape, (Dims{15, 8}));
  EXPECT_EQ(to_string(t.box), "[10:15, 4:8]");
  ASSERT_EQ(t.pieces.size(), 2u);
  EXPECT_EQ(to_string(t.pieces[0].box), "[10:11, 7:8]");
  EXPECT_EQ(to_string(t.pieces[1].box), "[11:14, 4:8]");
  EXPECT_EQ(t.pieces[1].data.shape, (Dims{3, 4}));
  EXPECT_EQ(t.pieces[1].data.strides, (Dims{4, 1}));
  float first = -1;
  std::memcpy(&first, t.pieces[1].data.data, sizeof first);
  EXPECT_EQ(first, 1.0f);
}

TEST(ShardedTensor, FlatRangesOfStridedDataKeepTheStride) {
  float memory[8] = {};
  const TensorView every_second =
      TensorView::strided(memory, DType::kFloat32, {4}, {2}, memory, sizeof memory);
  const ShardedTensor t =
      ShardedTensor::from_rank_offsets_flat("w", every_second, {2, 2}, {0, 4}, {});
  ASSERT_EQ(t.pieces.size(), 1u);
  EXPECT_EQ(t.pieces[0].data.strides, (Dims{4, 2}));
}

TEST(ShardedTensor, FlatRangesWithPrependedAxes) {
  const RankOffset offsets[] = {{0, 3, 4}};
  const ShardedTensor t =
      ShardedTensor::from_rank_offsets_flat("w", data({2}), {2, 3}, {1, 3}, offsets, {}, 1);
  ASSERT_EQ(t.pieces.size(), 1u);
  EXPECT_EQ(to_string(t.pieces[0].box), "[3:4, 0:1, 1:3]");
}

TEST(ShardedTensor, FlatRangesOfAnyBox) {
  // Elements [1, 5) of the flattened box [3:4, 5:7, 1:4] of an irregular grid: 2 rows of 3.
  const Box box{{3, 5, 1}, {1, 2, 3}};
  const ShardedTensor t =
      ShardedTensor::from_box_flat("w", data({4}), {4, 7, 5}, box, {1, 5}, {}, 1);
  EXPECT_EQ(t.global_shape, (Dims{4, 7, 5}));
  EXPECT_EQ(t.box, box);
  ASSERT_EQ(t.pieces.size(), 2u);
  EXPECT_EQ(to_string(t.pieces[0].box), "[3:4, 5:6, 2:4]");
  EXPECT_EQ(to_string(t.pieces[1].box), "[3:4, 6:7, 1:3]");
  EXPECT_TRUE(ShardedTensor::from_box_flat("w", data({0}), {4, 7, 5}, box, {6, 6}).pieces.empty());
  EXPECT_EQ(
      refusal([&] { ShardedTensor::from_box_flat("w", data({4}), {4, 7, 5}, box, {1, 5}, {}, 2); }),
      "box [3:4, 5:7, 1:4] does not begin with 2 prepended axes of size 1");
  EXPECT_EQ(refusal([&] {
              ShardedTensor::from_box_flat("w", data({0}), {4}, {{2}, {1}}, {0, 0}, {}, 2);
            }),
            "box [2:3] does not begin with 2 prepended axes of size 1");
  EXPECT_NE(refusal([&] { ShardedTensor::from_box_flat("w", data({4}), {4, 6, 5}, box, {1, 5}); }),
            "");
}

TEST(ShardedTensor, BadFlatRangesAreRefused) {
  const auto flat = [](int64_t size, FlatRange range) {
    ShardedTensor::from_rank_offsets_flat("w", data({size}), {2, 3}, range, {});
  };
  EXPECT_EQ(refusal([&] { flat(3, {4, 7}); }),
            "flat_range [4, 7) is not within the local tensor of shape [2, 3]");
  EXPECT_EQ(refusal([&] { flat(3, {3, 2}); }),
            "flat_range [3, 2) is not within the local tensor of shape [2, 3]");
  EXPECT_EQ(refusal([&] { flat(3, {0, 2}); }),
            "flat_range [0, 2) requires 1-D data of the same length, but data has shape [3]");
}

TEST(ShardedTensor, PlacementsGiveBoxReplicaAndHolders) {
  const Mesh mesh = Mesh::grid({2, 3}, {"dp", "tp"});
  const Placement placements[] = {Replicate{}, Shard{0}};
  const ShardedTensor t =
      ShardedTensor::from_placements("w", data({2, 4}), {5, 4}, mesh, placements, 4);
  EXPECT_EQ(to_string(t.box), "[2:4, 0:4]");
  EXPECT_EQ(t.replica_id, (Dims{1}));
  EXPECT_THAT(t.holders, ElementsAre(1, 4));
  ASSERT_EQ(t.pieces.size(), 1u);
  EXPECT_EQ(refusal([&] {
              ShardedTensor::from_placements("w", data({2, 4}), {5, 4}, mesh, placements, 5);
            }),
            "the local tensor has shape [2, 4], but the placements of a [5, 4] tensor give [1, 4]");
}

TEST(ShardedTensor, PartialPlacementsAreRefusedWithTheKey) {
  const Placement placements[] = {Partial{}};
  EXPECT_THAT(refusal([&] {
                ShardedTensor::from_placements("w", data({4}), {4}, Mesh::grid({2}), placements, 0);
              }),
              HasSubstr("Partial"));
}

TEST(ShardedTensor, RanksOutsideTheMeshHoldNothing) {
  const Placement placements[] = {Shard{0}};
  const ShardedTensor t =
      ShardedTensor::from_placements("w", data({0}), {4}, Mesh::grid({2}), placements, 7);
  EXPECT_TRUE(t.pieces.empty());
  EXPECT_TRUE(t.holders.empty());
}

TEST(ShardedTensor, LoneStridedShardsGiveSeveralBoxes) {
  const Placement placements[] = {StridedShard{0, 2}};
  const ShardedTensor t =
      ShardedTensor::from_placements("w", data({4, 3}), {8, 3}, Mesh::grid({2}), placements, 1);
  ASSERT_EQ(t.pieces.size(), 2u);
  EXPECT_EQ(to_string(t.pieces[0].box), "[2:4, 0:3]");
  EXPECT_EQ(to_string(t.pieces[1].box), "[6:8, 0:3]");
  EXPECT_EQ(t.pieces[1].data.data - t.data.data, 2 * 3 * 4);
  EXPECT_EQ(to_string(t.box), "[2:8, 0:3]");
  EXPECT_FALSE(t.is_regular_grid());
}

TEST(ShardedTensor, AParameterLiesWhereTheCheckpointSays) {
  // EP 2 and FSDP over two ranks each: rank 3 has the second half of the second half.
  const Sharding param{Mesh({2}, {1, 3}, {"edp"}), {Shard{0}}};
  const Sharding checkpoint{Mesh::grid({2, 2}, {"edp", "ep"}), {Replicate{}, Shard{0}}};
  const ShardedTensor t =
      ShardedTensor::from_param("w", data({2, 3}), {5, 3}, param, checkpoint, 3);
  EXPECT_EQ(t.global_shape, (Dims{10, 3}));
  ASSERT_EQ(t.pieces.size(), 1u);
  EXPECT_EQ(to_string(t.pieces[0].box), "[8:10, 0:3]");
  EXPECT_EQ(to_string(t.box), "[8:10, 0:3]");
  EXPECT_THAT(t.holders, ElementsAre(3));
  EXPECT_TRUE(is_main_replica(t.replica_id));
  EXPECT_THAT(
      refusal([&] { ShardedTensor::from_param("w", data({2, 3}), {5, 3}, param, checkpoint, 2); }),
      HasSubstr("rank 2 is not in the parameter's mesh"));
}

TEST(ShardedTensor, AnEmptyShardOfAParameterHasNoPieces) {
  const Sharding param{Mesh({2}, {1, 3}, {"edp"}), {Shard{0}}};
  const Sharding checkpoint{Mesh::grid({2, 2}, {"edp", "ep"}), {Replicate{}, Shard{0}}};
  const ShardedTensor t =
      ShardedTensor::from_param("w", data({0, 3}), {1, 3}, param, checkpoint, 3);
  EXPECT_EQ(t.global_shape, (Dims{2, 3}));
  EXPECT_TRUE(t.pieces.empty());
}

TEST(ShardedTensor, AParameterWithoutElementsIsOnePieceOnEveryRank) {
  const Sharding checkpoint{Mesh::grid({2}, {"ep"}), {Shard{0}}};
  const ShardedTensor t =
      ShardedTensor::from_param("w", data({4, 0}), {4, 0}, {Mesh({}, {1}), {}}, checkpoint, 1);
  ASSERT_EQ(t.pieces.size(), 1u);
  EXPECT_EQ(t.pieces[0].box, Box::whole({8, 0}));
  EXPECT_THAT(t.holders, ElementsAre(0, 1));
}

TEST(ShardedTensor, AnyBoxMayBeGivenWhenItFits) {
  const ShardedTensor t = ShardedTensor::from_box("w", data({3, 2}), {7, 7}, {{2, 5}, {3, 2}});
  EXPECT_FALSE(t.is_regular_grid());
  EXPECT_THAT(refusal([] { ShardedTensor::from_box("w", data({3}), {7}, {{5}, {3}}); }),
              HasSubstr("ends beyond the tensor"));
  EXPECT_EQ(refusal([] { ShardedTensor::from_box("w", data({3}), {7}, {{5}, {2}}); }),
            "box [5:7] does not match data's shape [3] with 0 prepended axes of size 1");
}

TEST(ShardedTensor, DeclaredReplicasAreSortedAndUnique) {
  ShardedTensor t = grid({4}, {});
  EXPECT_THAT(t.declare_replicas({5, 1, 5, 3}).holders, ElementsAre(1, 3, 5));
  EXPECT_EQ(refusal([&] { t.declare_replicas({}); }), "the list of replica ranks is empty");
  EXPECT_EQ(refusal([&] { t.declare_replicas({1, -4}); }), "replica rank -4 is negative");
}

TEST(ReplicaId, AllZerosIsTheMainReplica) {
  EXPECT_TRUE(is_main_replica({}));
  EXPECT_TRUE(is_main_replica({0, 0}));
  EXPECT_FALSE(is_main_replica({0, 1}));
}

TEST(ShardedObject, NamesItsPlaceInTheGrid) {
  const ShardedObject o = ShardedObject::make("w", 1, {2, 2}, {0, 1});
  EXPECT_EQ(o.unique_key(), "w/shard_0.1_2.2");
  EXPECT_EQ(grid_key("w/shard_0.1_2.2"), "w");
  EXPECT_EQ(grid_key("a/shard_1_2/shard_0_12"), "a/shard_1_2");
  for (const char* other :
       {"w", "/shard_", "w/shard_1", "w/shard_1_", "w/shard__2", "w/shard_x_2", "w/shard_1_2/x"}) {
    EXPECT_EQ(grid_key(other), other);
  }
  EXPECT_EQ(refusal([] { ShardedObject::make("w", 1, {2}, {2}); }),
            "global_offset [2] is outside a grid of shape [2]");
  EXPECT_EQ(refusal([] { ShardedObject::make("w", 1, {2}, {0, 0}); }),
            "global_offset [0, 0] does not have as many dims as a grid of shape [2]");
  EXPECT_THAT(refusal([] { ShardedObject::make("w", 1, {-2}, {0}); }), HasSubstr("negative dim"));
}

}  // namespace tilestone::sharded_test
