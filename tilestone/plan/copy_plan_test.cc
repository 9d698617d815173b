// Copies in plans and receipts, and the choice of the file to read from.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tilestone/base/error_testing.h"
#include "tilestone/plan/exchange_plan.h"
#include "tilestone/plan/nearest.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::copy_plan_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Replicas of tensors "a", "b", ... with these numbers of float32 elements, on the ranks `holders`,
// which are declared or not.
LocalSavePlan replicas(const std::vector<int64_t>& sizes, const std::vector<int>& holders) {
  Items items;
  char key = 'a';
  for (const int64_t size : sizes) {
    TensorItem item;
    item.key = std::string(1, key++);
    item.global_shape = {size};
    item.holders = holders;
    item.pieces.push_back({Box::whole({size}), TensorView::without_data(item.dtype, {size})});
    items.tensors.push_back(std::move(item));
  }
  return make_local_plan(items);
}

std::vector<Assignment> plan_with_groups(const std::vector<LocalSavePlan>& plans,
                                         const std::vector<std::vector<int>>& groups) {
  SavePlanner planner(static_cast<int>(plans.size()));
  for (int rank = 0; rank < static_cast<int>(plans.size()); ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (!groups[r].empty()) planner.set_group(rank, groups[r]);
    planner.add_encoded(rank, plans[r].encode());
  }
  return planner.finish();
}

TEST(CopyPlan, WhatAnotherRankOfTheGroupWritesIsCopiedByRuleAndByExchangeAlike) {
  // Four ranks hold everything. The model-parallel groups are {0, 1} and {2, 3}.
  const std::vector<std::vector<int>> groups = {{0, 1}, {1, 0}, {2, 3}, {3, 2}};
  for (const std::vector<int>& holders : {std::vector<int>{0, 1, 2, 3}, std::vector<int>{}}) {
    const LocalSavePlan plan = replicas({40, 30, 20, 10}, holders);
    const std::vector<Assignment> planned = plan_with_groups({plan, plan, plan, plan}, groups);
    for (int rank = 0; rank < 4; ++rank) {
      const auto r = static_cast<size_t>(rank);
      // Each rank writes one tensor, so one of the others belongs to its neighbour.
      ASSERT_EQ(planned[r].chunks.size(), 1u);
      EXPECT_EQ(planned[r].copies, planned[r ^ 1].chunks);
      if (holders.empty()) continue;
      const Assignment by_rule = plan_save_by_rule(plan, rank, checked_group(rank, 4, groups[r]));
      EXPECT_EQ(by_rule.chunks.size(), 1u);
      EXPECT_EQ(by_rule.copies, plan_save_by_rule(plan, rank ^ 1).chunks);
      EXPECT_THAT(plan_save_by_rule(plan, rank).copies, IsEmpty());
    }
    const std::vector<Assignment> one =
        plan_with_groups({plan, plan, plan, plan}, {{}, {1, 3}, {}, {}});
    EXPECT_EQ(one[1].copies, one[3].chunks);
    EXPECT_THAT(one[0].copies, IsEmpty());
    EXPECT_THAT(one[3].copies, IsEmpty());
  }
}

TEST(CopyPlan, TheSmallestAreKeptWithinTheBudget) {
  const LocalSavePlan plan = replicas({4, 2, 3, 2, 1}, {});
  const auto limited = [&](uint64_t max_bytes, uint64_t bytes) {
    Assignment assignment;
    assignment.copies = {0, 1, 2, 3, 4};
    EXPECT_EQ(limit_copies(plan, max_bytes, assignment), bytes);
    return assignment.copies;
  };
  EXPECT_THAT(limited(0, 0), IsEmpty());
  EXPECT_THAT(limited(4, 4), ElementsAre(4));
  EXPECT_THAT(limited(19, 12), ElementsAre(1, 4));
  EXPECT_THAT(limited(20, 20), ElementsAre(1, 3, 4));
  EXPECT_THAT(limited(UINT64_MAX, 48), ElementsAre(0, 1, 2, 3, 4));
}

// A common object, and a sharded one that rank 1 writes, with these contents.
LocalSavePlan objects(int rank, uint64_t common, uint64_t sharded) {
  LocalSavePlan plan;
  plan.objects.push_back({"common", true, true, common});
  plan.objects.push_back({"sharded", false, rank == 1, sharded});
  return plan;
}

TEST(CopyPlan, ObjectsOfTheSameContentAreCopiedWhateverTheGroup) {
  const std::vector<std::vector<int>> groups = {{0, 1}, {0, 1}, {2, 3}, {2, 3}};
  const auto planned = plan_with_groups(
      {objects(0, 5, 6), objects(1, 5, 6), objects(2, 5, 6), objects(3, 7, 6)}, groups);
  EXPECT_THAT(planned[0].objects, ElementsAre(0));
  EXPECT_THAT(planned[0].object_copies, ElementsAre(1));
  EXPECT_THAT(planned[1].objects, ElementsAre(1));
  EXPECT_THAT(planned[1].object_copies, ElementsAre(0));
  EXPECT_THAT(planned[2].object_copies, ElementsAre(0, 1));  // their writers are in another group
  EXPECT_THAT(planned[3].object_copies, ElementsAre(1));     // the other one's content differs
  const auto unknown = plan_with_groups({objects(0, 0, 0), objects(1, 0, 0)}, {{0, 1}, {0, 1}});
  EXPECT_THAT(unknown[1].object_copies, IsEmpty());
  const auto without = plan_with_groups({objects(0, 5, 6), objects(1, 5, 6)}, {{}, {}});
  EXPECT_THAT(without[1].object_copies, IsEmpty());
}

TEST(CopyPlan, ByRuleObjectsAreCopiedByAllRanksThatDoNotWriteThem) {
  const std::vector<int> group = {2, 3};
  const std::vector<int> of_lowest = {0, 1};
  EXPECT_THAT(plan_save_by_rule(objects(2, 5, 6), 2, group).object_copies, ElementsAre(0, 1));
  EXPECT_THAT(plan_save_by_rule(objects(0, 5, 6), 0, of_lowest).object_copies, ElementsAre(1));
  EXPECT_THAT(plan_save_by_rule(objects(1, 5, 6), 1, of_lowest).object_copies, ElementsAre(0));
  EXPECT_THAT(plan_save_by_rule(objects(2, 5, 6), 2).object_copies, IsEmpty());
  EXPECT_THAT(plan_save_by_rule(objects(2, 0, 0), 2, group).object_copies, IsEmpty());
}

TEST(CopyPlan, ByRuleAReplicaWithMegatronsIdIsCopiedInTheMainReplicasGroup) {
  const auto copies = [](const ReplicaId& id, bool with_group) {
    Items items;
    TensorItem item;
    item.key = "norm";
    item.global_shape = {4};
    item.replica_id = id;
    item.pieces.push_back({Box::whole({4}), TensorView::without_data(item.dtype, {4})});
    items.tensors.push_back(std::move(item));
    const std::vector<int> group = {0, 1};
    const LocalSavePlan plan = make_local_plan(items);
    const Assignment mine =
        with_group ? plan_save_by_rule(plan, 1, group) : plan_save_by_rule(plan, 1);
    EXPECT_EQ(mine.chunks.size(), is_main_replica(id) ? 1u : 0u);
    return mine.copies.size();
  };
  EXPECT_EQ(copies({0, 1, 0}, true), 1u);
  EXPECT_EQ(copies({1, 0, 0}, true), 1u);
  EXPECT_EQ(copies({0, 1, 0}, false), 0u);
  EXPECT_EQ(copies({0, 0, 0}, true), 0u);
  EXPECT_EQ(copies({0, 1, 1}, true), 0u);
  EXPECT_EQ(copies({1, 0}, true), 0u);
}

TEST(CopyPlan, ByRuleEachReplicaIsCopiedIfTheGroupIsTheWorld) {
  Items items;
  TensorItem item;
  item.key = "norm";
  item.global_shape = {4};
  item.replica_id = {0, 0, 1};
  item.pieces.push_back({Box::whole({4}), TensorView::without_data(item.dtype, {4})});
  items.tensors.push_back(std::move(item));
  const std::vector<int> group = {0, 1};
  EXPECT_THAT(plan_save_by_rule(make_local_plan(items), 1, group, true).copies, ElementsAre(0));
}

// Two tensor-parallel ranks, three data-parallel replicas: a large tensor that all have is written
// by one rank and copied by its neighbour, so both get fewer of the others.
TEST(CopyPlan, ByExchangeCopiesCountAsLoad) {
  const std::vector<std::vector<int>> groups = {{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4, 5}, {4, 5}};
  const LocalSavePlan plan = replicas({300, 100, 100, 100, 100, 100, 100}, {});
  const std::vector<Assignment> planned = plan_with_groups(std::vector(6, plan), groups);
  for (size_t rank = 0; rank < 6; ++rank) {
    int64_t held = 0;
    for (const auto* chunks : {&planned[rank].chunks, &planned[rank].copies}) {
      for (const uint32_t i : *chunks) held += i == 0 ? 300 : 100;
    }
    EXPECT_EQ(held, 300) << rank;
  }
}

TEST(CopyPlan, ObjectsAndChunksShareTheBudgetBySize) {
  LocalSavePlan plan = replicas({4, 2}, {});  // 16 and 8 bytes
  plan.objects.push_back({"x", true, true, 1, 8});
  plan.objects.push_back({"y", true, true, 1, 12});
  const auto limited = [&](uint64_t max_bytes, uint64_t bytes) {
    Assignment assignment;
    assignment.copies = {0, 1};
    assignment.object_copies = {0, 1};
    EXPECT_EQ(limit_copies(plan, max_bytes, assignment), bytes);
    return assignment;
  };
  EXPECT_EQ(limited(7, 0), Assignment());
  EXPECT_EQ(limited(8, 8), (Assignment{{}, {}, {}, {0}}));
  EXPECT_EQ(limited(27, 16), (Assignment{{}, {}, {1}, {0}}));
  EXPECT_EQ(limited(28, 28), (Assignment{{}, {}, {1}, {0, 1}}));
  EXPECT_EQ(limited(UINT64_MAX, 44), (Assignment{{}, {}, {0, 1}, {0, 1}}));
}

TEST(CopyPlan, AGroupIsOfRanksOfTheWorldWithTheOwnOneEachOnce) {
  EXPECT_THAT(checked_group(2, 4, {3, 2, 0}), ElementsAre(0, 2, 3));
  const auto refused = [](int rank, std::vector<int> group) {
    const Error error = error_of([&] { checked_group(rank, 4, std::move(group)); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.rank(), rank);
    return error.message();
  };
  EXPECT_THAT(refused(1, {0, 2}), HasSubstr("does not include that rank"));
  EXPECT_THAT(refused(1, {0, 1, 0}), HasSubstr("names rank 0 twice"));
  EXPECT_THAT(refused(1, {1, 4}), HasSubstr("names rank 4, which is outside a world of 4 ranks"));
  EXPECT_THAT(refused(1, {-1, 1}), HasSubstr("names rank -1"));
}

TEST(CopyPlan, AnAssignmentComesBackWithItsCopies) {
  const Assignment assignment{{0, 2}, {1}, {1, 5}, {0, 3}};
  EXPECT_EQ(Assignment::decode(assignment.encode()), assignment);
}

Receipt receipt_of(int rank, bool copies) {
  Receipt receipt;
  receipt.rank = rank;
  receipt.world_size = 2;
  receipt.save_id = "0123456789abcdef";
  receipt.files = {{"file-" + std::to_string(rank), 100}};
  receipt.tensors = {{"w", {}, DType::kFloat32, {4}}};
  const Receipt::Chunk chunk{0, Box::whole({4}), {0, 0, 100, {0, 7, 8}}};
  (copies ? receipt.copies : receipt.chunks).push_back(chunk);
  return receipt;
}

TEST(CopyPlan, CopiesInReceiptsAreNoExcuseForAnElementWrittenTwice) {
  EXPECT_EQ(
      merge_receipts({receipt_of(0, false), receipt_of(1, true)}, CopyPolicy::kNoted).copies.size(),
      1u);
  const Error error = error_of(
      [] { merge_receipts({receipt_of(0, false), receipt_of(1, false)}, CopyPolicy::kNoted); });
  EXPECT_EQ(error.code(), ErrorCode::kCoverage);
  EXPECT_EQ(error.key(), "w");
}

Receipt object_receipt(int rank, bool copy, const std::string& file) {
  Receipt receipt;
  receipt.rank = rank;
  receipt.world_size = 2;
  receipt.save_id = "0123456789abcdef";
  receipt.files = {{file, 100}};
  const Receipt::Object object{"o", {}, {0, 10, 50, {0, 0, 8}}, 77};
  (copy ? receipt.object_copies : receipt.objects).push_back(object);
  return receipt;
}

TEST(CopyPlan, AReceiptComesBackWithItsCopiesOfObjectsAndContents) {
  for (const bool copy : {false, true}) {
    const Receipt receipt = object_receipt(1, copy, "file");
    const Receipt decoded = Receipt::decode(receipt.encode());
    ASSERT_EQ(decoded.objects.size(), copy ? 0u : 1u);
    ASSERT_EQ(decoded.object_copies.size(), copy ? 1u : 0u);
    const Receipt::Object& object = copy ? decoded.object_copies[0] : decoded.objects[0];
    EXPECT_EQ(object.key, "o");
    EXPECT_EQ(object.at.offset, 10u);
    EXPECT_EQ(object.at.checksums.item_crc32, 8u);
    EXPECT_EQ(object.content, 77u);
    EXPECT_EQ(decoded.encode(), receipt.encode());
  }
}

TEST(CopyPlan, ACopyOfAnObjectThatNobodyWroteIsRefused) {
  const Error error = error_of(
      [] { merge_receipts({object_receipt(0, true, "a"), object_receipt(1, true, "b")}); });
  EXPECT_EQ(error.code(), ErrorCode::kCoverage);
  EXPECT_EQ(
      merge_receipts({object_receipt(0, false, "a"), object_receipt(1, true, "b")}).objects.size(),
      1u);
}

// One tensor with one chunk in each of the files 0, 1 and 2, each with a copy in the other two
// files.
struct Stored {
  Metadata metadata;
  std::vector<FileWriter> writers = {{0, "host-a"}, {1, "host-a"}, {2, "host-b"}};

  Stored() {
    metadata.files = {"0", "1", "2"};
    for (uint32_t t = 0; t < 3; ++t) {
      StoredTensor tensor;
      tensor.key = std::to_string(t);
      tensor.shape = {4};
      tensor.chunks.push_back({Box::whole({4}), {t}});
      metadata.tensors.push_back(std::move(tensor));
      for (uint32_t file = 0; file < 3; ++file) {
        if (file != t) metadata.copies.push_back({t, 0, {file}});
      }
    }
    metadata.index();
  }

  std::vector<uint32_t> files_read(int rank, bool same_world, const std::string& host,
                                   int times = 1) const {
    Nearest nearest(metadata, writers, rank, same_world, host);
    std::vector<uint32_t> files;
    for (int i = 0; i < times; ++i) {
      for (uint32_t t = 0; t < 3; ++t) {
        files.push_back(metadata.place(t, 0, nearest.choose(t, 0, 16)).file);
      }
    }
    return files;
  }
};

TEST(Nearest, TheOwnFileGoesFirstThenTheHostsThenTheOneThatIsReadLeast) {
  const Stored stored;
  EXPECT_THAT(stored.files_read(1, true, "host-b"), ElementsAre(1, 1, 1));
  EXPECT_THAT(stored.files_read(1, false, "host-b"), ElementsAre(2, 2, 2));
  for (const uint32_t file : stored.files_read(3, false, "host-a", 4)) EXPECT_NE(file, 2u);
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<int> reads(3, 0);
    for (const uint32_t file : stored.files_read(rank, false, "host-c", 4)) ++reads[file];
    EXPECT_THAT(reads, ElementsAre(4, 4, 4)) << rank;
  }
  EXPECT_NE(stored.files_read(0, false, ""), stored.files_read(1, false, ""));
}

TEST(Nearest, AFileThatIsARanksOwnIsReadForOthersByThisRankAlone) {
  Stored stored;
  for (StoredTensor& tensor : stored.metadata.tensors) tensor.chunks[0].at.length = 64u << 20;
  const StripeOwners owners(stored.metadata, 3, {2, FileWriter::kUnknown, 0});
  std::set<int> of_unknown;
  for (uint64_t offset = 0; offset < (64u << 20); offset += 1u << 20) {
    EXPECT_EQ(owners.owner(0, offset), 2);
    EXPECT_EQ(owners.owner(2, offset), 0);
    of_unknown.insert(owners.owner(1, offset));
  }
  EXPECT_EQ(of_unknown.size(), 3u);
}

// Files 0 and 1 must be opened for other items. Of the rest, file 3 has most.
TEST(Nearest, OfSeveralPlacesTheRankTakesTheFilesThatItOpensAnyway) {
  Metadata metadata;
  metadata.files = {"0", "1", "2", "3", "4"};
  const std::vector<std::vector<uint32_t>> items = {{0}, {1}, {2, 1}, {4, 3}, {3, 2}, {2, 4, 3}};
  for (uint32_t t = 0; t < items.size(); ++t) {
    StoredTensor tensor;
    tensor.key = std::to_string(t);
    tensor.shape = {4};
    tensor.chunks.push_back({Box::whole({4}), {items[t][0]}});
    metadata.tensors.push_back(std::move(tensor));
    for (const uint32_t file : std::span(items[t]).subspan(1)) {
      metadata.copies.push_back({t, 0, {file}});
    }
  }
  metadata.index();
  const std::vector<FileWriter> writers = {{0, ""}, {1, ""}, {2, ""}, {3, ""}, {4, ""}};
  for (int rank = 0; rank < 2; ++rank) {
    Nearest nearest(metadata, writers, rank, true, "");
    nearest.expect(items);
    std::vector<uint32_t> files;
    for (uint32_t t = 0; t < items.size(); ++t) {
      files.push_back(metadata.place(t, 0, nearest.choose(t, 0, 16)).file);
    }
    EXPECT_THAT(files, ElementsAre(0, 1, 1, 3, 3, 3)) << rank;
  }
}

TEST(Nearest, AnOwnCopyIsOneOfAChunkInAnothersFile) {
  const Stored stored;
  const Nearest nearest(stored.metadata, stored.writers, 1, true, "");
  EXPECT_EQ(nearest.own_copy(1, 0), kNoCopy);  // the chunk's own item is in its file
  EXPECT_EQ(stored.metadata.place(0, 0, nearest.own_copy(0, 0)).file, 1u);
  EXPECT_EQ(Nearest(stored.metadata, stored.writers, 1, false, "").own_copy(0, 0), kNoCopy);
}

}  // namespace tilestone::copy_plan_test
