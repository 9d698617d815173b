// How the ranks of a save in the background meet in files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "tilestone/engine/commit/receipts_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/receipt_files_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::engine::receipts_test {

using testing::HasSubstr;

const std::string kId = "01234567-89ab-4cde-8f01-23456789abcd";

Deadline in_time() { return Deadline::after(std::chrono::seconds(20)); }

Bytes receipt_of(int rank) { return Bytes(3, static_cast<std::byte>(rank)); }

// A location whose coordinator holds the lock.
struct SaveLocation {
  explicit SaveLocation(std::shared_ptr<Storage> inner = memory_storage())
      : storage(std::move(inner)) {
    storage->make_directory(std::string(kTilestoneDirectory));
    lock = storage->try_lock(std::string(kLockName));
  }
  BackgroundReceipts of(int rank, int ranks) const {
    return BackgroundReceipts(storage, kId, rank, ranks);
  }
  std::optional<BackgroundReceipts::Failed> outcome_of(BackgroundReceipts& rank,
                                                       Deadline deadline = in_time()) const {
    return rank.wait_for_outcome(*storage, torch_dist_format(), deadline);
  }
  std::vector<std::string> names() const { return storage->list(); }

  std::shared_ptr<Storage> storage;
  std::unique_ptr<StorageLock> lock;
};

TEST(Receipts, AllReachTheCoordinatorTheOutcomeReachesAllAndNothingStays) {
  for (const int ranks : {1, 2, 5}) {
    const SaveLocation location;
    BackgroundReceipts coordinator = location.of(0, ranks);
    std::vector<std::thread> others;
    for (int rank = 1; rank < ranks; ++rank) {
      others.emplace_back([&, rank] {
        BackgroundReceipts mine = location.of(rank, ranks);
        mine.leave(receipt_of(rank), in_time());
        EXPECT_FALSE(location.outcome_of(mine));
      });
    }
    const std::vector<Bytes> receipts = coordinator.gather(receipt_of(0), in_time());
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(receipts[static_cast<size_t>(rank)], receipt_of(rank));
    }
    coordinator.end({});
    coordinator.tidy();
    for (std::thread& other : others) other.join();
    EXPECT_THAT(location.names(), testing::ElementsAre(std::string(kLockName)));
  }
}

TEST(Receipts, TheFirstFailureEndsTheSaveOnAllRanksAtOnce) {
  const SaveLocation location;
  BackgroundReceipts coordinator = location.of(0, 3), failed = location.of(1, 3),
                     other = location.of(2, 3);
  failed.leave(Error(ErrorCode::kIo, "the disk is full").with_key("w"));
  try {
    coordinator.gather(receipt_of(0), in_time());  // the receipt of rank 2 is missing
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_EQ(error.key(), "w");
    coordinator.end(BackgroundReceipts::Failed{error, true});
  }
  failed.remove_left_error();
  other.leave(receipt_of(2), in_time());
  const auto outcome = location.outcome_of(other);
  ASSERT_TRUE(outcome);
  EXPECT_THAT(outcome->error.what(), HasSubstr("the disk is full"));
  EXPECT_TRUE(outcome->may_exist);
  // The coordinator has not seen the receipt of rank 2, so the outcome stays, as a leftover.
  coordinator.tidy();
  EXPECT_THAT(location.names(),
              testing::UnorderedElementsAre(std::string(kLockName), ended_name(kId)));
  EXPECT_EQ(parse_tilestone_name(ended_name(kId))->kind, kReceiptKind);
  EXPECT_EQ(parse_tilestone_name(receipt_name(kId, 17))->save_id, kId);
  EXPECT_FALSE(parse_tilestone_name(receipt_name(kId, 17) + "x"));
}

TEST(Receipts, ARankWhoseDiskIsFullSaysAtLeastThatItHasFailed) {
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    return call.op == StorageOp::kAppend ? FaultAction::fail(ENOSPC) : FaultAction::pass();
  });
  const SaveLocation location(disk->storage());
  BackgroundReceipts coordinator = location.of(0, 2), full = location.of(1, 2);
  EXPECT_THROW(full.leave(receipt_of(1), in_time()), Error);
  full.leave(Error(ErrorCode::kIo, "the disk is full"));
  expect_error([&] { coordinator.gather(receipt_of(0), in_time()); }, ErrorCode::kIo,
               "could not say why");
  EXPECT_THAT(location.names(),
              testing::UnorderedElementsAre(std::string(kLockName), receipt_name(kId, 1)));
}

TEST(Receipts, ADamagedReceiptIsAnErrorThatNamesItsFile) {
  const SaveLocation location;
  for (const size_t size : {1, 9, 40}) {
    const std::string name = receipt_name(kId, 1);
    location.storage->publish(name, temporary_name(kId, "receipt-1"),
                              Bytes(size, static_cast<std::byte>(1)), true, Deadline::never());
    BackgroundReceipts coordinator = location.of(0, 2);
    try {
      coordinator.gather(receipt_of(0), in_time());
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.file(), name);
    }
  }
}

TEST(Receipts, AMissingReceiptOrOutcomeIsNamedAtTheDeadline) {
  const SaveLocation location;
  BackgroundReceipts coordinator = location.of(0, 3), other = location.of(1, 3);
  other.leave(receipt_of(1), in_time());
  const Deadline soon = Deadline::after(std::chrono::milliseconds(20));
  try {
    coordinator.gather(receipt_of(0), soon);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_EQ(error.rank(), 2);
  }
  expect_error([&] { location.outcome_of(other, soon); }, ErrorCode::kTimeout, "no outcome");
  expect_error([&] { other.leave(receipt_of(1), soon); }, ErrorCode::kTimeout, "its receipt");
}

TEST(Receipts, ACoordinatorThatDiesIsMissedByItsLock) {
  SaveLocation location;
  BackgroundReceipts other = location.of(1, 2);
  other.reserve();
  other.leave(receipt_of(1), in_time());
  location.lock.reset();
  expect_error([&] { location.outcome_of(other); }, ErrorCode::kRankFailed,
               "ended before it published");
}

// Where a host does not see locks that another holds, a rank that looks can't know.
TEST(Receipts, ACoordinatorWhoseLockWasNeverSeenIsNotTakenForDead) {
  SaveLocation location;
  location.lock.reset();
  BackgroundReceipts other = location.of(1, 2);
  other.reserve();
  other.leave(receipt_of(1), in_time());
  expect_error(
      [&] { location.outcome_of(other, Deadline::after(std::chrono::milliseconds(1200))); },
      ErrorCode::kTimeout, "no outcome");
}

TEST(Receipts, AFileThatWasReservedServesWhenNoOtherCanBeMadeAndDoesNotStayUnused) {
  bool full = false;
  const auto disk = FaultDisk::create(memory_storage(), [&](const StorageCall& call) {
    return full && call.op == StorageOp::kCreate ? FaultAction::fail(ENOSPC) : FaultAction::pass();
  });
  const SaveLocation location(disk->storage());
  BackgroundReceipts coordinator = location.of(0, 2), mine = location.of(1, 2);
  coordinator.reserve();
  {
    BackgroundReceipts unused = location.of(2, 3);
    unused.reserve();
    EXPECT_EQ(location.names().size(), 3u);
  }
  mine.reserve();
  full = true;
  mine.leave(Error(ErrorCode::kIo, "no inode is free"));
  expect_error([&] { coordinator.gather(receipt_of(0), in_time()); }, ErrorCode::kIo, "no inode");
  coordinator.end(BackgroundReceipts::Failed{Error(ErrorCode::kIo, "no inode is free"), false});
  EXPECT_TRUE(location.outcome_of(mine));
  coordinator.tidy();
  EXPECT_THAT(location.names(), testing::ElementsAre(std::string(kLockName)));
}

}  // namespace tilestone::engine::receipts_test
