// Torch's rank-local mode: ranks that die at any storage call of their saves, a machine that
// crashes at any call of publish(), and calls of publish() that go wrong. The same ranks and
// publish() complete it afterwards.
#include <gtest/gtest.h>

#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::crash_points_rank_local_test {

constexpr int kRanks = 3;
constexpr int64_t kFirst = 3;
constexpr uint64_t kAnswerStride = 7;

// As row_state(), with an object that differs from rank to rank.
StateDict state_of(int rank) {
  StateDict state = row_state(rank, kRanks, kFirst);
  state["of rank " + std::to_string(rank)] = Value(int64_t{rank});
  return state;
}

// A rank whose client is dead throws; the others continue.
void save_all(const std::function<std::shared_ptr<Storage>(int)>& storage, uint64_t number = 1) {
  for (int rank = 0; rank < kRanks; ++rank) {
    try {
      save(state_of(rank), Location(storage(rank)), rank_local(rank, kRanks, number));
    } catch (const Error&) {
    }
  }
}

std::shared_ptr<Storage> saved() {
  auto storage = memory_storage();
  save_all([&](int) { return storage; });
  return storage;
}

void expect_state(const std::shared_ptr<Storage>& storage) {
  expect_rows(Location(storage), kFirst, kRanks);
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(checkpoint.read_object("of rank " + std::to_string(rank)), Value(rank));
  }
  EXPECT_TRUE(checkpoint.verify().ok());
}

void expect_ordinary(const std::shared_ptr<Storage>& storage) {
  expect_state(storage);
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_FALSE(checkpoint.metadata().rank_local);
  EXPECT_EQ(checkpoint.metadata().find_tensor("p")->chunks.size(), 1u);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_FALSE(storage->stat("__" + std::to_string(rank) + ".metadata"));
  }
  EXPECT_TRUE(find_unpublished(Location(storage)).empty());
  EXPECT_TRUE(find_leftovers(Location(storage)).empty());
}

bool stands(const std::shared_ptr<Storage>& storage) {
  try {
    Checkpoint::open(Location(storage));
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    return false;
  }
}

std::vector<std::string> unpublished_in(const std::shared_ptr<Storage>& storage) {
  std::vector<std::string> ids;
  for (const UnpublishedSave& save : find_unpublished(Location(storage))) {
    ids.push_back(save.save_id);
  }
  return ids;
}

// After a crash during publish(), the values are the same, and the save can still be published: as
// the same save if gc has cleaned up.
void expect_recovery(const FileImage& image) {
  const auto storage = memory_storage(image);
  expect_state(storage);
  const auto cleaned = memory_storage(image);
  remove_leftovers(Location(cleaned));
  expect_state(cleaned);
  if (!storage->stat(".metadata")) {
    EXPECT_EQ(unpublished_in(cleaned), unpublished_in(storage));
  }
  try {
    publish(Location(storage));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();  // it was published completely
  }
  expect_state(storage);
  remove_leftovers(Location(storage));
  expect_ordinary(storage);
}

std::shared_ptr<FaultDisk> publish_on(const FileImage& image, const FaultHook& hook, bool fails) {
  auto disk = FaultDisk::create(memory_storage(image), hook);
  try {
    publish(Location(disk->storage(0)));  // a failure after the switch does not throw
  } catch (const Error& error) {
    EXPECT_TRUE(fails || disk->crashed()) << error.what();
  }
  return disk;
}

std::shared_ptr<FaultDisk> save_on(const FaultHook& hook) {
  auto disk = FaultDisk::create(memory_storage(), hook);
  save_all([&](int rank) { return disk->storage(rank); });
  return disk;
}

TEST(RankLocalCrashes, PublishingLeavesOneKindOrTheOtherAndCanBeCompleted) {
  const LogLevel before = set_log_level(LogLevel::kError);
  const FileImage saved_image = memory_image(*saved());
  const auto check = [](const FileImage& left, uint64_t) { expect_recovery(left); };
  for (const FileImage& image : {saved_image, without_tilestones_files(saved_image)}) {
    std::cout << crash_everywhere(
                     [&](const FaultHook& hook) { return publish_on(image, hook, false); }, check)
              << " crash points in all, ";
    std::cout << fail_everywhere(
                     [&](const FaultHook& hook) { return publish_on(image, hook, true); }, check,
                     kAnswerStride)
              << " calls went wrong\n";
  }
  set_log_level(before);
}

TEST(RankLocalCrashes, ARankThatDiesAtAnyCallOfItsSaveCompletesItWhenItComesAgain) {
  const LogLevel before = set_log_level(LogLevel::kError);
  const auto check = [](const FileImage& left, uint64_t) {
    const auto storage = memory_storage(left);
    if (stands(storage)) expect_state(storage);
    save_all([&](int) { return storage; });
    expect_state(storage);
    publish(Location(storage));
    remove_leftovers(Location(storage));  // from before the rank's restart
    expect_ordinary(storage);
  };
  const uint64_t points = crash_everywhere(save_on, check);
  std::cout << points << " crash points in all, ";
  const auto check_failure = [](const FileImage& left, uint64_t) {
    const auto storage = memory_storage(left);
    if (!stands(storage)) save_all([&](int) { return storage; });
    if (!stands(storage))
      save_all([&](int) { return storage; }, 2);  // the first has failed for good
    expect_state(storage);
  };
  std::cout << fail_everywhere(save_on, check_failure, kAnswerStride) << " calls went wrong\n";
  EXPECT_GT(points, 20u);
  set_log_level(before);
}

}  // namespace tilestone::crash_points_rank_local_test
