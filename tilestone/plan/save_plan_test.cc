#include "tilestone/plan/save_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <string>

#include "tilestone/base/error_testing.h"

namespace tilestone::save_plan_test {

using testing::ElementsAre;
using testing::IsEmpty;

TensorItem item(std::string key, Dims shape, std::vector<Box> boxes, std::vector<int> holders = {},
                ReplicaId replica_id = {}) {
  TensorItem made;
  made.key = std::move(key);
  made.global_shape = std::move(shape);
  made.replica_id = std::move(replica_id);
  made.holders = std::move(holders);
  for (Box& box : boxes) {
    Dims local = box.shape;
    made.pieces.push_back({std::move(box), TensorView::without_data(made.dtype, local)});
  }
  return made;
}

ObjectItem object(std::string key, bool common = false, ReplicaId replica_id = {}) {
  return {std::move(key), {}, Value(1), std::move(replica_id), common};
}

LocalSavePlan plan_of(std::vector<TensorItem> tensors, std::vector<ObjectItem> objects = {}) {
  return make_local_plan({std::move(tensors), std::move(objects)});
}

Error planning_error(const std::vector<LocalSavePlan>& plans) {
  return error_of([&] { plan_save(plans); });
}

// ---- Local plans ----

TEST(LocalPlan, KeepsTheOrderOfItemsAndPieces) {
  const LocalSavePlan plan =
      plan_of({item("b", {4}, {{{2}, {2}}, {{0}, {1}}}, {0, 1}),
               item("a", {}, {{{}, {}}}, {0, 1}, {1}), item("b", {4}, {{{1}, {1}}})},
              {object("o"), object("c", true, {2})});
  ASSERT_EQ(plan.tensors.size(), 2u);
  ASSERT_EQ(plan.chunks.size(), 4u);
  EXPECT_EQ(plan.tensors[plan.chunks[0].tensor].key, "b");
  EXPECT_EQ(to_string(plan.chunks[1].box), "[0:1]");
  EXPECT_FALSE(plan.chunks[2].main_replica);
  EXPECT_EQ(plan.chunks[3].tensor, plan.chunks[0].tensor);
  EXPECT_EQ(plan.chunks[3].holders, PlanChunk::kUnknown);
  EXPECT_EQ(plan.holder_sets, (std::vector<std::vector<int>>{{0, 1}}));
  EXPECT_TRUE(plan.objects[1].common);
  EXPECT_FALSE(plan.objects[1].main_replica);
}

TEST(LocalPlan, RefusesWhatOneRankCanSeeIsWrong) {
  Error error = error_of([] { plan_of({item("w", {4}, {{{3}, {2}}})}); });
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "w", "[3]", "[2]", "[4]", "dim 0"));

  error = error_of([] { plan_of({item("w", {4}, {{{0}, {2}}}), item("w", {4}, {{{1}, {3}}})}); });
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "w", "[0:2]", "[1:4]"));

  error = error_of([] { plan_of({item("w", {4}, {}), item("w", {5}, {})}); });
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "w", "float32 [4]", "float32 [5]"));

  error = error_of([] { plan_of({item("w", {4}, {})}, {object("w")}); });
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "w", "tensor", "object"));

  error = error_of([] { plan_of({}, {object("o"), object("o")}); });
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "o", "two objects"));

  const int64_t most = std::numeric_limits<int64_t>::max();
  TensorItem huge = item("w", {most}, {});
  huge.dtype = DType::kComplex128;
  huge.pieces.push_back({{{0}, {most}}, TensorView()});
  error = error_of([&] { plan_of({huge}); });
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "w", std::to_string(most), "16"));
}

// ---- Assigning by exchange ----

TEST(SavePlanner, ReplicasAreSharedOutByBytes) {
  // Three ranks hold everything. Each writes one of the large tensors; the small ones even out the
  // load.
  std::vector<LocalSavePlan> plans;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<TensorItem> tensors;
    for (int t = 0; t < 9; ++t) {
      const int64_t n = t < 3 ? 600 : 100;
      tensors.push_back(item("t" + std::to_string(t), {n}, {{{0}, {n}}}, {}, {rank}));
    }
    plans.push_back(plan_of(tensors));
  }
  for (const Assignment& mine : plan_save(plans)) {
    int64_t elements = 0;
    for (uint32_t i : mine.chunks) elements += plans[0].chunks[i].box.numel();
    EXPECT_EQ(elements, 800);
  }
}

TEST(SavePlanner, WhatOneRankAloneMustWriteCounts) {
  const TensorItem shared = item("shared", {10}, {{{0}, {10}}});
  const std::vector<LocalSavePlan> plans = {plan_of({item("own", {1}, {{{0}, {1}}}), shared}),
                                            plan_of({shared})};
  const auto assignments = plan_save(plans);
  EXPECT_THAT(assignments[0].chunks, ElementsAre(0));
  EXPECT_THAT(assignments[1].chunks, ElementsAre(0));
}

TEST(SavePlanner, AnEmptyShardIsNoReplicaOfAFullOneAtItsOffset) {
  // 4 elements over 3 ranks: [0:2], [2:4] and an empty shard at 4; and one at 0.
  const std::vector<LocalSavePlan> plans = {
      plan_of({item("w", {4}, {{{0}, {0}}})}), plan_of({item("w", {4}, {{{0}, {2}}})}),
      plan_of({item("w", {4}, {{{2}, {2}}})}), plan_of({item("w", {4}, {{{4}, {0}}})})};
  const auto assignments = plan_save(plans);
  EXPECT_THAT(assignments[0].chunks, IsEmpty());
  EXPECT_THAT(assignments[1].chunks, ElementsAre(0));
  EXPECT_THAT(assignments[2].chunks, ElementsAre(0));
  EXPECT_THAT(assignments[3].chunks, IsEmpty());
}

TEST(SavePlanner, ATensorWithoutElementsIsWrittenOnceByItsLowestLister) {
  const TensorItem nothing = item("none", {0, 4}, {{{0, 0}, {0, 4}}});
  const TensorItem scalar = item("one", {}, {{{}, {}}});
  const std::vector<LocalSavePlan> plans = {plan_of({scalar}), plan_of({scalar, nothing}),
                                            plan_of({nothing})};
  const auto assignments = plan_save(plans);
  EXPECT_THAT(assignments[0].chunks, ElementsAre(0));
  EXPECT_THAT(assignments[1].chunks, ElementsAre(1));
  EXPECT_THAT(assignments[2].chunks, IsEmpty());
}

TEST(SavePlanner, HoldersThatDoNotAgreeAreTakenAsListers) {
  // Rank 0 says that rank 2 has the chunk too, but rank 2 does not list it.
  const std::vector<LocalSavePlan> plans = {plan_of({item("w", {4}, {{{0}, {4}}}, {0, 1, 2})}),
                                            plan_of({item("w", {4}, {{{0}, {4}}}, {0, 1, 2})}),
                                            plan_of({})};
  size_t written = 0;
  for (const Assignment& mine : plan_save(plans)) written += mine.chunks.size();
  EXPECT_EQ(written, 1u);
  EXPECT_THAT(plan_save(plans)[2].chunks, IsEmpty());
}

TEST(SavePlanner, ObjectsGoToTheirMainReplicaCommonOnesToTheLowestRank) {
  const std::vector<LocalSavePlan> plans = {
      plan_of({}, {object("o", false, {1})}),
      plan_of({}, {object("c", true, {1}), object("o")}),
      plan_of({}, {object("c", true, {2})}),
  };
  const auto assignments = plan_save(plans);
  EXPECT_THAT(assignments[0].objects, IsEmpty());
  EXPECT_THAT(assignments[1].objects, ElementsAre(0, 1));
  EXPECT_THAT(assignments[2].objects, IsEmpty());
}

TEST(SavePlanner, TheOrderOfAddingDoesNotMatter) {
  std::vector<LocalSavePlan> plans;
  for (int rank = 0; rank < 5; ++rank) {
    plans.push_back(plan_of({item("a", {10}, {{{0}, {10}}}), item("b", {7}, {{{0}, {7}}}),
                             item("c", {5}, {{{rank}, {1}}})},
                            {object("o", true)}));
  }
  SavePlanner backwards(5);
  for (int rank = 4; rank >= 0; --rank) {
    backwards.add_encoded(rank, plans[static_cast<size_t>(rank)].encode());
  }
  EXPECT_EQ(backwards.finish(), plan_save(plans));
}

TEST(SavePlanner, DamagedPlansAreCorrupt) {
  const Bytes good = plan_of({item("w", {7}, {{{0}, {7}}})}, {object("o")}).encode();
  SavePlanner planner(1);
  EXPECT_EQ(error_of([&] { planner.add_encoded(0, ByteView(good).first(good.size() - 1)); }).code(),
            ErrorCode::kCorrupt);
}

// Tensors equal to those of the previous rank are not decoded again.
TEST(SavePlanner, RanksWithTheSameAndWithOtherTensorsMayFollowOneAnother) {
  std::vector<LocalSavePlan> plans;
  for (const int stage : {0, 0, 1, 0, 1, 1}) {
    const auto rank = static_cast<int64_t>(plans.size());
    const std::string own = "stage" + std::to_string(stage);
    plans.push_back(plan_of({item("all", {6}, {{{rank}, {1}}}), item(own, {3}, {{{0}, {3}}}),
                             item(own + ".b", {2 + stage}, {{{0}, {2 + stage}}})}));
  }
  // Each rank writes the element that only it lists, and its stage's two tensors have one writer.
  std::map<std::string, int> writers;
  const std::vector<Assignment> assigned = plan_save(plans);
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    EXPECT_EQ(assigned[rank].chunks.front(), 0u);
    for (const uint32_t i : assigned[rank].chunks) {
      ++writers[plans[rank].tensors[plans[rank].chunks[i].tensor].key];
    }
  }
  EXPECT_EQ(writers,
            (std::map<std::string, int>{
                {"all", 6}, {"stage0", 1}, {"stage0.b", 1}, {"stage1", 1}, {"stage1.b", 1}}));
}

TEST(SavePlanner, ADisagreementIsFoundAfterRanksWithTheSameTensors) {
  SavePlanner planner(3);
  planner.add_encoded(0, plan_of({item("w", {6}, {{{0}, {2}}})}).encode());
  planner.add_encoded(1, plan_of({item("w", {6}, {{{2}, {2}}})}).encode());
  const Bytes other = plan_of({item("w", {7}, {{{4}, {2}}})}).encode();
  const Error error = error_of([&] { planner.add_encoded(2, other); });
  EXPECT_THAT(error,
              IsError(ErrorCode::kMismatch, "w", "rank 0", "float32 [6]", "rank 2", "float32 [7]"));
}

// Two replicas list the same three boxes in different orders. One box is a part of a row, so boxes
// with the same first element and different last ones are adjacent, as are equal boxes.
TEST(SavePlanner, BoxesDifferByOffsetOrShape) {
  const std::vector<Box> boxes = {{{0, 0}, {1, 2}}, {{0, 2}, {1, 3}}, {{1, 0}, {3, 5}}};
  const std::vector<Box> turned = {boxes[2], boxes[0], boxes[1]};
  const std::vector<LocalSavePlan> plans = {plan_of({item("w", {4, 5}, boxes)}),
                                            plan_of({item("w", {4, 5}, turned)})};
  std::vector<Box> written;
  const auto assignments = plan_save(plans);
  for (size_t rank = 0; rank < 2; ++rank) {
    for (uint32_t i : assignments[rank].chunks) written.push_back(plans[rank].chunks[i].box);
  }
  std::sort(written.begin(), written.end());
  EXPECT_EQ(written, boxes);

  const Error error = planning_error({plan_of({item("w", {4, 5}, {{{0, 0}, {4, 5}}})}),
                                      plan_of({item("w", {4, 5}, {{{0, 0}, {4, 4}}})})});
  EXPECT_EQ(error.code(), ErrorCode::kCoverage);
  EXPECT_THAT(error.message(), Mentions("rank 0", "[0:4, 0:5]"));
  EXPECT_THAT(error.message(), Mentions("rank 1", "[0:4, 0:4]"));
}

TEST(SavePlanner, ABoxOutsideItsTensorIsCorrupt) {
  LocalSavePlan plan = plan_of({item("w", {4}, {{{0}, {4}}})});
  plan.chunks[0].box = {{2}, {3}};
  EXPECT_EQ(planning_error({plan}).code(), ErrorCode::kCorrupt);
}

TEST(SavePlanner, DisagreementsNameKeyAndBothRanks) {
  TensorItem half = item("w", {4}, {{{0}, {4}}});
  half.dtype = DType::kFloat16;
  Error error =
      planning_error({plan_of({}), plan_of({item("w", {4}, {{{0}, {4}}})}), plan_of({half})});
  EXPECT_THAT(error,
              IsError(ErrorCode::kMismatch, "w", "rank 1", "float32 [4]", "rank 2", "float16 [4]"));

  error = planning_error(
      {plan_of({item("w", {4}, {{{0}, {4}}})}), plan_of({item("w", {2, 2}, {{{0, 0}, {2, 2}}})})});
  EXPECT_THAT(error, IsError(ErrorCode::kMismatch, "w", "rank 0", "float32 [4]", "rank 1",
                             "float32 [2, 2]"));

  error = planning_error({plan_of({item("w", {4}, {{{0}, {4}}})}), plan_of({}, {object("w")})});
  EXPECT_THAT(error, IsError(ErrorCode::kMismatch, "w", "tensor", "object", "rank 0", "rank 1"));

  error = planning_error({plan_of({}, {object("w")}), plan_of({item("w", {4}, {{{0}, {4}}})})});
  EXPECT_THAT(error, IsError(ErrorCode::kMismatch, "w", "tensor", "object", "rank 0", "rank 1"));

  error = planning_error({plan_of({}, {object("o", true)}), plan_of({}, {object("o", false)})});
  EXPECT_THAT(error, IsError(ErrorCode::kMismatch, "o", "rank 0", "rank 1", "common"));
}

TEST(SavePlanner, OverlapsAndHolesNameKeyBoxAndRanks) {
  Error error = planning_error({plan_of({item("w", {4, 4}, {{{0, 0}, {2, 4}}})}),
                                plan_of({item("w", {4, 4}, {{{2, 0}, {2, 4}}})}),
                                plan_of({item("w", {4, 4}, {{{1, 2}, {1, 1}}})})});
  EXPECT_THAT(error, IsError(ErrorCode::kCoverage, "w", "rank 0", "[0:2, 0:4]", "rank 2",
                             "[1:2, 2:3]", "overlap"));

  error = planning_error({plan_of({item("w", {4}, {{{0}, {3}}})})});
  EXPECT_THAT(error, IsError(ErrorCode::kCoverage, "w", "no rank", "[3:4]", "[4]"));

  error = planning_error({plan_of({item("w", {4}, {})})});
  EXPECT_THAT(error, IsError(ErrorCode::kCoverage, "w", "no rank", "[0:4]", "[4]"));
}

TEST(SavePlanner, MissingAndDoubleRanksAndMainReplicasAreRefused) {
  SavePlanner planner(3);
  planner.add_encoded(0, LocalSavePlan().encode());
  planner.add_encoded(2, LocalSavePlan().encode());
  Error error = error_of([&] { planner.finish(); });
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "", "rank 1", "missing"));
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error_of([&] { planner.add_encoded(2, LocalSavePlan().encode()); }),
              IsError(ErrorCode::kInvalidArgument, "", "rank 2", "twice"));
  EXPECT_THAT(error_of([&] { planner.add_encoded(3, LocalSavePlan().encode()); }),
              IsError(ErrorCode::kInvalidArgument, "", "rank 3", "3 ranks"));
  EXPECT_THAT(error_of([] { SavePlanner none(0); }),
              IsError(ErrorCode::kInvalidArgument, "", "world_size 0"));

  error = planning_error({plan_of({}, {object("o")}), plan_of({}, {object("o")})});
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "o", "two", "rank 0", "rank 1"));

  error = planning_error({plan_of({}), plan_of({}, {object("o", false, {1})})});
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "o", "no main replica", "rank 1"));

  LocalSavePlan twice = plan_of({item("w", {4}, {{{0}, {4}}})});
  twice.chunks.push_back(twice.chunks[0]);
  EXPECT_THAT(planning_error({twice}),
              IsError(ErrorCode::kInvalidArgument, "w", "rank 0", "[0:4]", "twice"));
}

// ---- Alone ----

TEST(PlanAlone, GivesWhatAWorldOfOneIsGivenByExchange) {
  const Box whole = Box::whole({4});
  const std::vector<LocalSavePlan> plans = {
      plan_of({}),
      plan_of({item("a", {4}, {whole}), item("b", {}, {{{}, {}}})}, {object("o", true)}),
      plan_of({item("a", {4}, {whole}, {0, 1}, {1})}, {object("o", true, {1})}),
      plan_of({item("a", {4}, {{{2}, {2}}, {{0}, {2}}})}),
      plan_of({item("a", {0, 3}, {{{0, 0}, {0, 3}}}), item("b", {4}, {whole})}),
      plan_of({item("a", {4}, {{{0}, {0}}, whole})}),
  };
  for (size_t i = 0; i < plans.size(); ++i) {
    EXPECT_EQ(plan_save_alone(plans[i]), plan_save({&plans[i], 1}).front()) << i;
  }
}

TEST(PlanAlone, RefusesWhatAWorldOfOneIsRefused) {
  const std::vector<LocalSavePlan> plans = {
      plan_of({item("a", {4}, {{{0}, {2}}})}),
      plan_of({item("a", {4}, {}), item("b", {4}, {Box::whole({4})})}),
      plan_of({}, {object("o", false, {1})}),
  };
  for (size_t i = 0; i < plans.size(); ++i) {
    const Error alone = error_of([&] { plan_save_alone(plans[i]); });
    EXPECT_EQ(alone.code(), planning_error({plans[i]}).code()) << i;
    EXPECT_EQ(std::string(alone.what()), planning_error({plans[i]}).what()) << i;
  }
}

// ---- By rule ----

TEST(ByRule, UnknownHoldersLeaveItToTheMainReplica) {
  const LocalSavePlan main = plan_of({item("w", {4}, {{{0}, {4}}})}, {object("c", true)});
  const LocalSavePlan other =
      plan_of({item("w", {4}, {{{0}, {4}}}, {}, {1})}, {object("c", true, {1})});
  EXPECT_THAT(plan_save_by_rule(main, 0).chunks, ElementsAre(0));
  EXPECT_THAT(plan_save_by_rule(main, 0).objects, ElementsAre(0));
  EXPECT_THAT(plan_save_by_rule(other, 1).chunks, IsEmpty());
  EXPECT_THAT(plan_save_by_rule(other, 1).objects, IsEmpty());
}

TEST(ByRule, ARankThatIsNotAmongItsHoldersIsRefused) {
  const LocalSavePlan plan = plan_of({item("w", {4}, {{{0}, {4}}}, {1, 2})});
  const Error error = error_of([&] { plan_save_by_rule(plan, 0); });
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "w", "holders", "[0:4]", "rank 0"));
  EXPECT_EQ(error.rank(), 0);
}

TEST(ByRule, ATensorWithoutElementsIsWrittenByItsLowestHolder) {
  const LocalSavePlan plan = plan_of({item("none", {0}, {{{0}, {0}}}, {3, 5})});
  EXPECT_THAT(plan_save_by_rule(plan, 3).chunks, ElementsAre(0));
  EXPECT_THAT(plan_save_by_rule(plan, 5).chunks, IsEmpty());
}

// ---- Encoding ----

LocalSavePlan sample_plan() {
  std::vector<int> everyone(40);
  for (int i = 0; i < 40; ++i) everyone[static_cast<size_t>(i)] = i;
  return plan_of({item("model.layers.0.weight", {300, 70}, {{{100, 0}, {200, 70}}}, {1, 5, 9, 10}),
                  item("model.layers.0.bias", {7}, {{{0}, {7}}}, everyone, {1}),
                  item("scalar", {}, {{{}, {}}}), item("none", {0, 3}, {{{0, 0}, {0, 3}}})},
                 {object("rng"), object("common", true, {4})});
}

void expect_same(const LocalSavePlan& a, const LocalSavePlan& b) {
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    EXPECT_EQ(a.tensors[i].key, b.tensors[i].key);
    EXPECT_EQ(a.tensors[i].dtype, b.tensors[i].dtype);
    EXPECT_EQ(a.tensors[i].global_shape, b.tensors[i].global_shape);
  }
  ASSERT_EQ(a.chunks.size(), b.chunks.size());
  for (size_t i = 0; i < a.chunks.size(); ++i) {
    EXPECT_EQ(a.chunks[i].tensor, b.chunks[i].tensor);
    EXPECT_EQ(a.chunks[i].holders, b.chunks[i].holders);
    EXPECT_EQ(a.chunks[i].main_replica, b.chunks[i].main_replica);
    EXPECT_EQ(a.chunks[i].box, b.chunks[i].box);
  }
  EXPECT_EQ(a.holder_sets, b.holder_sets);
  ASSERT_EQ(a.objects.size(), b.objects.size());
  for (size_t i = 0; i < a.objects.size(); ++i) {
    EXPECT_EQ(a.objects[i].key, b.objects[i].key);
    EXPECT_EQ(a.objects[i].common, b.objects[i].common);
    EXPECT_EQ(a.objects[i].main_replica, b.objects[i].main_replica);
  }
}

TEST(Encoding, PlansAndAssignmentsComeBack) {
  const LocalSavePlan plan = sample_plan();
  expect_same(LocalSavePlan::decode(plan.encode()), plan);
  const Assignment assignment{{0, 5, 6, 1000}, {2}};
  EXPECT_EQ(Assignment::decode(assignment.encode()), assignment);
  EXPECT_EQ(Assignment::decode(Assignment{}.encode()), Assignment{});
}

TEST(Encoding, IsCompact) {
  std::vector<TensorItem> tensors;
  std::vector<int> all(16'384);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  for (int i = 0; i < 1000; ++i) {
    tensors.push_back(item("model.layers." + std::to_string(i) + ".self_attention.weight",
                           {4096, 4096}, {{{0, 0}, {4096, 4096}}}, all));
  }
  EXPECT_LT(plan_of(tensors).encode().size(), 50'000u);
}

template <typename T>
void expect_harmless(const Bytes& good, uint64_t seed) {
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(error_of([&] { T::decode(ByteView(good).first(size)); }).code(), ErrorCode::kCorrupt)
        << "truncated to " << size;
  }
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes = good;
    for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    try {
      T::decode(bytes);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kCorrupt) << "seed " << seed << " round " << round;
    }
  }
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes(random() % 64);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    if (!bytes.empty()) bytes[0] = std::byte{1};
    try {
      T::decode(bytes);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kCorrupt) << "seed " << seed << " round " << round;
    }
  }
}

TEST(Encoding, DamagedPlansAreCorruptAndNothingWorse) {
  expect_harmless<LocalSavePlan>(sample_plan().encode(), 1);
  expect_harmless<Assignment>(Assignment{{0, 5, 6, 1000}, {2, 3}}.encode(), 2);
}

}  // namespace tilestone::save_plan_test
