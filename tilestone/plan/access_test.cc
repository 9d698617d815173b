#include "tilestone/plan/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tilestone/base/error.h"
#include "tilestone/geometry/tilings_testing.h"
#include "tilestone/plan/access_objects_internal.h"

namespace tilestone::access_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMain = 0;
constexpr int64_t kReplica = 1;

using Ranks = std::vector<Items>;

TensorItem shard(std::string key, Dims shape, Box box, int64_t replica = kMain) {
  TensorItem item;
  item.key = std::move(key);
  item.global_shape = std::move(shape);
  item.replica_id = {0, replica};
  item.pieces.push_back({std::move(box), {}});
  return item;
}

ObjectItem object(std::string key, int64_t replica = kMain) {
  return {std::move(key), {}, Value(1), {replica}, false};
}

// The error message; "" if there is no error.
std::string problem(const Ranks& ranks) {
  std::vector<Bytes> encoded;
  for (const Items& items : ranks) encoded.push_back(encode_access(items));
  try {
    check_access(std::vector<ByteView>(encoded.begin(), encoded.end()));
    return "";
  } catch (const Error& error) {
    return std::string(to_string(error.code())) + ": " + error.what();
  }
}

Ranks objects(std::vector<std::vector<ObjectItem>> of_ranks) {
  Ranks ranks;
  for (auto& items : of_ranks) ranks.push_back({{}, std::move(items)});
  return ranks;
}

TEST(Access, ABoxWithUnknownReplicasCountsOnce) {
  Ranks ranks = {{{shard("w", {4}, {{0}, {2}})}, {}},
                 {{shard("w", {4}, {{0}, {2}})}, {}},
                 {{shard("w", {4}, {{2}, {2}})}, {}}};
  EXPECT_THAT(problem(ranks), HasSubstr("held by the main replicas of ranks 0 and 1"));
  for (Items& items : ranks) items.tensors[0].unknown_replicas = true;
  EXPECT_EQ(problem(ranks), "");
  ranks[1].tensors[0].pieces[0].box = {{1}, {2}};
  EXPECT_THAT(problem(ranks), HasSubstr("held by the main replicas of ranks 0 and 1"));
}

TEST(Access, AcceptsReplicasEmptyShardsAndTensorsWithoutElements) {
  const Ranks ranks = {
      {{shard("w", {4, 2}, {{0, 0}, {2, 2}}), shard("none", {0, 3}, {{0, 0}, {0, 3}})}, {}},
      {{shard("w", {4, 2}, {{0, 0}, {2, 2}}, kReplica)}, {}},
      {{shard("w", {4, 2}, {{2, 0}, {0, 2}}), shard("none", {0, 3}, {{0, 0}, {0, 3}})}, {}},
      {{shard("w", {4, 2}, {{2, 0}, {2, 2}}), shard("scalar", {}, {{}, {}})}, {}},
      {{shard("w", {4, 2}, {{2, 0}, {0, 2}}, kReplica)}, {}},
  };
  EXPECT_EQ(problem(ranks), "");
}

TEST(Access, NamesTheRanksOfTwoMainReplicas) {
  const Ranks equal = {{{shard("w", {4}, {{0}, {4}})}, {}},
                       {{shard("w", {4}, {{0}, {4}}, kReplica)}, {}},
                       {{}, {}},
                       {{shard("w", {4}, {{0}, {4}})}, {}}};
  EXPECT_THAT(problem(equal),
              AllOf(HasSubstr("(key w)"),
                    HasSubstr("box [0:4] is held by the main replicas of ranks 0 and 3")));
  const Ranks partly = {{{shard("w", {4}, {{0}, {3}})}, {}}, {{shard("w", {4}, {{2}, {2}})}, {}}};
  EXPECT_THAT(problem(partly),
              HasSubstr("box [2:3] is held by the main replicas of ranks 0 and 1"));
  const Ranks twice = {{{shard("w", {2}, {{0}, {2}}), shard("w", {2}, {{0}, {2}})}, {}}};
  EXPECT_THAT(problem(twice), HasSubstr("held twice as main replica by rank 0"));
}

TEST(Access, NamesWhoHasAReplicaOfWhatNoMainReplicaHolds) {
  const Ranks replica = {{{shard("w", {4}, {{0}, {2}})}, {}},
                         {{shard("w", {4}, {{2}, {0}})}, {}},
                         {{shard("w", {4}, {{2}, {2}}, kReplica)}, {}}};
  EXPECT_THAT(problem(replica), HasSubstr("box [2:4] of a tensor of shape [4] is held by no main "
                                          "replica; a replica of it is on rank 2"));
  const Ranks none = {{{shard("w", {4}, {{0}, {2}})}, {}}, {{shard("w", {4}, {{2}, {0}})}, {}}};
  EXPECT_THAT(problem(none), HasSubstr("is held by no rank"));
}

TEST(Access, NamesRanksThatDisagreeOnDtypeShapeOrKind) {
  Ranks ranks = {{{shard("w", {2}, {{0}, {2}})}, {}},
                 {{shard("w", {2}, {{0}, {2}}, kReplica)}, {}}};
  ranks[1].tensors[0].dtype = DType::kBFloat16;
  EXPECT_THAT(problem(ranks), AllOf(HasSubstr("rank 0 has float32 [2], rank 1 has bfloat16 [2]"),
                                    HasSubstr("mismatch: ")));
  ranks[1].tensors[0] = shard("w", {3}, {{0}, {3}}, kReplica);
  EXPECT_THAT(problem(ranks), HasSubstr("rank 1 has float32 [3]"));
  ranks[1] = {{}, {object("w")}};
  EXPECT_THAT(problem(ranks), HasSubstr("tensor and for an object, on rank 0 and on rank 1"));
  std::swap(ranks[0], ranks[1]);
  EXPECT_THAT(problem(ranks), HasSubstr("tensor and for an object, on rank 0 and on rank 1"));
  ranks[0] = {{}, {object("w/shard_0_1")}};
  EXPECT_THAT(problem(ranks), AllOf(HasSubstr("(key w)"), HasSubstr("a tensor and for an object, "
                                                                    "on rank 0 and on rank 1")));
}

TEST(Access, SaysItInMegatronCoresWords) {
  const std::string pattern = "Invalid access pattern: ";
  const TensorItem half = shard("w", {4}, {{0}, {2}});
  const TensorItem rest = shard("w", {4}, {{2}, {2}});
  EXPECT_THAT(problem({{{half}, {}}}), HasSubstr(pattern + "box"));
  EXPECT_THAT(problem({{{half, rest, half}, {}}}), HasSubstr(pattern + "box"));
  EXPECT_THAT(problem(objects({{object("a/shard_0_2")}})), HasSubstr(pattern + "the cell"));
  EXPECT_THAT(problem(objects({{object("a/shard_3_2")}})), HasSubstr(pattern + "rank 0"));
  EXPECT_THAT(problem(objects({{object("a", kReplica)}})), HasSubstr(pattern + "an object"));
  EXPECT_THAT(problem(objects({{object("a/shard_0_1")}, {object("a/shard_0_1")}})),
              HasSubstr("Duplicate ShardedObject keys: a/shard_0_1 is held by the main replicas"));
}

TEST(Access, CountsWhatIsCommonToAllRanksOnce) {
  Ranks ranks(3);
  for (Items& items : ranks) {
    items.tensors.push_back(shard("w", {2}, {{0}, {2}}));
    items.tensors[0].common = true;
    items.objects.push_back(object("step"));
    items.objects[0].common = true;
  }
  ranks[0] = {};
  EXPECT_EQ(problem(ranks), "");
}

TEST(Access, OfObjectsEveryPlaceOfTheGridHasOneMainReplica) {
  const ObjectItem a = object("rng/shard_0.0_2.1");
  const ObjectItem b = object("rng/shard_1.0_2.1");
  const ObjectItem replica = object("rng/shard_1.0_2.1", kReplica);
  EXPECT_EQ(problem(objects({{a, object("own")}, {b}, {replica}, {object("x/shard__")}})), "");
  EXPECT_THAT(problem(objects({{a}, {replica}})),
              HasSubstr("held by no main replica; a replica of it is on rank 1"));
  EXPECT_THAT(problem(objects({{a}, {}, {b}, {b}})), HasSubstr("main replicas of ranks 2 and 3"));
  EXPECT_THAT(
      problem(objects({{b}, {replica}})),
      AllOf(HasSubstr("(key rng)"), HasSubstr("the cell [0, 0] of an object whose grid is "
                                              "[2, 1] is held by no rank (cells held: 1)")));
  EXPECT_THAT(
      problem(objects({{a}, {b}, {object("rng/shard_0_2")}})),
      HasSubstr("ranks disagree on the grid of an object: rank 0 has [2, 1], rank 2 has [2]"));
  EXPECT_THAT(problem(objects({{object("rng/shard_2_2")}})),
              HasSubstr("rank 0 holds the cell [2]"));
  EXPECT_THAT(problem(objects({{object("rng/shard_0_99999999999999")}})),
              HasSubstr("the cell [1]"));
}

TEST(Access, TakesKeysOfObjectsApart) {
  const auto cell = parse_grid_cell("a/shard_1/shard_0.10_2.11");
  ASSERT_TRUE(cell);
  EXPECT_EQ(cell->key, "a/shard_1");
  EXPECT_EQ(cell->offset, (Dims{0, 10}));
  EXPECT_EQ(cell->shape, (Dims{2, 11}));
  for (const char* other : {"a", "a/shard_", "a/shard_0", "a/shard_0_1.2", "a/shard_0._1.1",
                            "a/shard_x_1", "a/shard_-1_2", "a/shard_0_1/b", "a/shard_0_1_2"}) {
    EXPECT_FALSE(parse_grid_cell(other)) << other;
  }
}

TEST(Access, WhatIsNoPlanIsRefused) {
  const Bytes broken(3, std::byte{1});
  const ByteView view = broken;
  EXPECT_THROW(check_access({&view, 1}), Error);
  Items outside;
  outside.tensors.push_back(shard("w", {2}, {{1}, {2}}));
  EXPECT_THROW(encode_access(outside), Error);
}

// ---- Random tilings and what can be wrong with them ----

using Random = std::mt19937_64;

size_t below(Random& random, size_t n) { return random() % n; }

// Tensors that random ranks tile, regularly or not, with replicas and empty shards on other ranks.
Ranks random_ranks(Random& random) {
  Ranks ranks(1 + below(random, 6));
  const size_t tensors = 1 + below(random, 3);
  for (size_t t = 0; t < tensors; ++t) {
    const Dims shape = {int64_t(2 + below(random, 3) * 2), int64_t(2 + below(random, 2) * 4),
                        int64_t(1 + below(random, 3))};
    const std::vector<Box> boxes = below(random, 2) == 0
                                       ? grid_tiling(shape, {2, int64_t(1 + below(random, 2)), 1})
                                       : random_tiling(shape, 2 + below(random, 6), random);
    const std::string key = "t" + std::to_string(t);
    for (const Box& box : boxes) {
      const auto add = [&](Box of, int64_t replica) {
        ranks[below(random, ranks.size())].tensors.push_back(
            shard(key, shape, std::move(of), replica));
      };
      add(box, kMain);
      if (below(random, 2) == 0) add(box, kReplica);
      if (below(random, 3) == 0) add({box.offset, {0, box.shape[1], box.shape[2]}}, kMain);
    }
  }
  return ranks;
}

// A random non-empty shard of a main replica.
std::pair<size_t, size_t> random_shard(const Ranks& ranks, Random& random) {
  for (;;) {
    const size_t rank = below(random, ranks.size());
    if (ranks[rank].tensors.empty()) continue;
    const size_t i = below(random, ranks[rank].tensors.size());
    const TensorItem& item = ranks[rank].tensors[i];
    if (item.replica_id.back() == kMain && !item.pieces[0].box.empty()) return {rank, i};
  }
}

// Moves a box by one element within its tensor. Returns false if there is no room.
bool shift(TensorItem& item) {
  Box& box = item.pieces[0].box;
  for (size_t d = 0; d < box.rank(); ++d) {
    const bool up = box.end(d) < item.global_shape[d];
    if (!up && box.offset[d] == 0) continue;
    box.offset[d] += up ? 1 : -1;
    return true;
  }
  return false;
}

enum class Mutation { kDrop, kDuplicate, kShift, kDType, kDemote, kPromote };

// Returns false if there is nothing to mutate.
bool mutate(Ranks& ranks, Mutation mutation, Random& random) {
  const auto [rank, i] = random_shard(ranks, random);
  std::vector<TensorItem>& items = ranks[rank].tensors;
  TensorItem& item = items[i];
  switch (mutation) {
    case Mutation::kDrop: {
      const std::string key = item.key;
      items.erase(items.begin() + static_cast<ptrdiff_t>(i));
      return std::any_of(ranks.begin(), ranks.end(), [&](const Items& of) {
        return std::any_of(of.tensors.begin(), of.tensors.end(),
                           [&](const TensorItem& other) { return other.key == key; });
      });
    }
    case Mutation::kDuplicate: {
      TensorItem copy = item;
      ranks[below(random, ranks.size())].tensors.push_back(std::move(copy));
      return true;
    }
    case Mutation::kShift:
      return shift(item);
    case Mutation::kDType: {
      item.dtype = DType::kInt8;
      return true;
    }
    case Mutation::kDemote:
      item.replica_id = {0, 7};
      return true;
    case Mutation::kPromote:
      for (Items& of : ranks) {
        for (TensorItem& other : of.tensors) {
          if (other.replica_id.back() == kMain || other.pieces[0].box.empty()) continue;
          other.replica_id = {0, 0};
          return true;
        }
      }
      return false;
  }
  return false;
}

TEST(AccessProperty, TilingsAreAcceptedAndEveryMutationIsFound) {
  Random random(14);
  std::map<Mutation, int> found;
  for (int round = 0; round < 3000; ++round) {
    const Ranks ranks = random_ranks(random);
    ASSERT_EQ(problem(ranks), "") << "round " << round;
    const auto mutation = static_cast<Mutation>(round % 6);
    Ranks mutated = ranks;
    if (!mutate(mutated, mutation, random)) continue;
    ASSERT_NE(problem(mutated), "") << "round " << round << ", mutation " << round % 6;
    ++found[mutation];
  }
  for (int m = 0; m < 6; ++m) EXPECT_GT(found[static_cast<Mutation>(m)], 50) << m;
}

}  // namespace tilestone::access_test
