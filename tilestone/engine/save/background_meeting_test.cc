// How the ranks of a save in the background meet in files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/message_files_internal.h"
#include "tilestone/engine/save/background_meeting_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::engine::background_meeting_test {

using testing::HasSubstr;

const std::string kId = "01234567-89ab-4cde-8f01-23456789abcd";

Deadline in_time() { return Deadline::after(std::chrono::seconds(20)); }

std::string file_of(const std::string& message) {
  return ".tilestone/" + kId + ".receipt-" + message;
}

Bytes receipt_of(int rank) { return Bytes(3, static_cast<std::byte>(rank)); }

// A location whose coordinator holds the lock.
struct SaveLocation {
  explicit SaveLocation(std::shared_ptr<Storage> inner = memory_storage())
      : storage(std::move(inner)) {
    if (Directories* const own = storage->directories())
      own->make(std::string(kTilestoneDirectory));
    lock = storage->claim(std::string(kLockName));
  }
  // More than 3 ranks are groups.
  BackgroundMeeting of(int rank, int ranks) const {
    return BackgroundMeeting(storage, kId, rank, ranks, {.most_names = 3});
  }
  std::optional<BackgroundMeeting::Failed> outcome_of(BackgroundMeeting& rank,
                                                      Deadline deadline = in_time()) const {
    return rank.wait_for_outcome(*storage, torch_dist_format(), deadline);
  }
  std::vector<std::string> names() const { return storage->list(); }

  std::shared_ptr<Storage> storage;
  std::unique_ptr<StorageClaim> lock;
};

TEST(BackgroundMeeting, AllReachTheCoordinatorTheOutcomeReachesAllAndNothingStays) {
  for (const int ranks : {1, 2, 7}) {
    const SaveLocation location;
    BackgroundMeeting coordinator = location.of(0, ranks);
    std::vector<std::thread> others;
    for (int rank = 1; rank < ranks; ++rank) {
      others.emplace_back([&, rank] {
        BackgroundMeeting mine = location.of(rank, ranks);
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

TEST(BackgroundMeeting, TheFirstFailureEndsTheSaveOnAllRanksAtOnce) {
  const SaveLocation location;
  BackgroundMeeting coordinator = location.of(0, 3), failed = location.of(1, 3),
                    other = location.of(2, 3);
  failed.leave_failure(Error(ErrorCode::kIo, "the disk is full").with_key("w"));
  try {
    coordinator.gather(receipt_of(0), in_time());  // the receipt of rank 2 is missing
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_EQ(error.key(), "w");
    coordinator.end(BackgroundMeeting::Failed{error, true});
  }
  other.leave(receipt_of(2), in_time());
  const auto outcome = location.outcome_of(other);
  ASSERT_TRUE(outcome);
  EXPECT_THAT(outcome->error.what(), HasSubstr("the disk is full"));
  EXPECT_TRUE(outcome->may_exist);
  // The coordinator has not seen the receipt of rank 2, so the outcome stays, as a leftover.
  coordinator.tidy();
  EXPECT_THAT(location.names(),
              testing::UnorderedElementsAre(std::string(kLockName), file_of("ended")));
  EXPECT_EQ(parse_tilestone_name(file_of("ended"))->kind, kReceiptKind);
  EXPECT_EQ(parse_tilestone_name(file_of("3-17"))->save_id, kId);
  EXPECT_FALSE(parse_tilestone_name(file_of("3-17") + ".x"));
  // Of older builds.
  EXPECT_EQ(parse_tilestone_name(".tilestone/" + kId + ".ended")->kind, kReceiptKind);
}

TEST(BackgroundMeeting, ARankWhoseDiskIsFullSaysAtLeastThatItHasFailed) {
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    return call.op == StorageOp::kAppend ? FaultAction::fail(ENOSPC) : FaultAction::pass();
  });
  const SaveLocation location(disk->storage());
  // The receipt of rank 2 is missing.
  BackgroundMeeting coordinator = location.of(0, 3), full = location.of(1, 3);
  EXPECT_THROW(full.leave(receipt_of(1), in_time()), Error);
  full.leave_failure(Error(ErrorCode::kIo, "the disk is full"));
  expect_error([&] { coordinator.gather(receipt_of(0), in_time()); }, ErrorCode::kIo,
               "could not say why (rank 1)");
  EXPECT_THAT(location.names(), testing::UnorderedElementsAre(std::string(kLockName),
                                                              file_of("0-1"), file_of("failed")));
}

TEST(BackgroundMeeting, ADamagedReceiptIsAnErrorThatNamesItsFile) {
  const SaveLocation location;
  for (const size_t size : {1, 9, 40}) {
    const std::string name = file_of("0-1");
    location.storage->publish(name, temporary_name(kId, "receipt-1"),
                              Bytes(size, static_cast<std::byte>(1)), true, Deadline::never());
    BackgroundMeeting coordinator = location.of(0, 2);
    try {
      coordinator.gather(receipt_of(0), in_time());
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.file(), name);
    }
  }
}

TEST(BackgroundMeeting, AMissingReceiptOrOutcomeIsNamedAtTheDeadline) {
  const SaveLocation location;
  BackgroundMeeting coordinator = location.of(0, 3), other = location.of(1, 3);
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

TEST(BackgroundMeeting, ACoordinatorThatDiesIsMissedByItsLock) {
  SaveLocation location;
  BackgroundMeeting other = location.of(1, 2);
  other.reserve();
  other.leave(receipt_of(1), in_time());
  location.lock.reset();
  expect_error([&] { location.outcome_of(other); }, ErrorCode::kRankFailed,
               "ended before it published");
}

// Where a host does not see locks that another holds, a rank that looks can't know.
TEST(BackgroundMeeting, ACoordinatorThatDiesIsMissedByItsLease) {
  SaveLocation location(memory_objects());
  BackgroundMeeting other = location.of(1, 2);
  other.reserve();
  other.leave(receipt_of(1), in_time());
  location.lock.reset();
  put_file(*location.storage, std::string(kLockName), as_bytes("which nobody renews"));
  expect_error([&] { location.outcome_of(other); }, ErrorCode::kRankFailed,
               "has ended before it published");
}

// The store's clocks differ: the lease's age seems to be an hour more.
TEST(BackgroundMeeting, ACoordinatorWhoseLeaseOnlySeemsToHaveLapsedIsNotMissed) {
  class Store : public MemoryObjects {
   public:
    Store() : MemoryObjects({}) {}
    std::optional<FileInfo> stat(const std::string& name) override {
      auto info = MemoryObjects::stat(name);
      if (info && has_other_clock) *info->least_age += 3600;
      return info;
    }
    std::atomic<bool> has_other_clock = false;
  };
  const auto store = std::make_shared<Store>();
  const SaveLocation location(store);
  BackgroundMeeting coordinator = location.of(0, 2), other = location.of(1, 2);
  other.reserve();
  other.leave(receipt_of(1), in_time());
  store->has_other_clock = true;
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    coordinator.end({});
  });
  EXPECT_FALSE(location.outcome_of(other));
  ends.join();
}

TEST(BackgroundMeeting, ACoordinatorWhoseLockWasNeverSeenIsNotTakenForDead) {
  SaveLocation location;
  location.lock.reset();
  BackgroundMeeting other = location.of(1, 2);
  other.reserve();
  other.leave(receipt_of(1), in_time());
  expect_error(
      [&] { location.outcome_of(other, Deadline::after(std::chrono::milliseconds(1200))); },
      ErrorCode::kTimeout, "no outcome");
}

TEST(BackgroundMeeting, AFileThatWasReservedServesWhenNoOtherCanBeMadeAndDoesNotStayUnused) {
  bool full = false;
  const auto disk = FaultDisk::create(memory_storage(), [&](const StorageCall& call) {
    return full && call.op == StorageOp::kCreate ? FaultAction::fail(ENOSPC) : FaultAction::pass();
  });
  const SaveLocation location(disk->storage());
  BackgroundMeeting coordinator = location.of(0, 2), mine = location.of(1, 2);
  coordinator.reserve();
  {
    BackgroundMeeting unused = location.of(2, 3);
    unused.reserve();
    EXPECT_EQ(location.names().size(), 4u);
  }
  mine.reserve();
  full = true;
  mine.leave_failure(Error(ErrorCode::kIo, "no inode is free"));
  expect_error([&] { coordinator.gather(receipt_of(0), in_time()); }, ErrorCode::kIo, "no inode");
  coordinator.end(BackgroundMeeting::Failed{Error(ErrorCode::kIo, "no inode is free"), false});
  EXPECT_TRUE(location.outcome_of(mine));
  coordinator.tidy();
  EXPECT_THAT(location.names(), testing::ElementsAre(std::string(kLockName)));
}

}  // namespace tilestone::engine::background_meeting_test
