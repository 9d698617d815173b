// Saves without a communicator in which a rank fails, on the disk or because of its state: which
// ranks learn of it, what remains, and what ends the save.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::save_by_files_failures_test {

Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorCode::kInternal, ""};
}

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

std::string save_id() { return engine::save_id_of(kToken, 0); }

std::string receipt_of(int rank, int ranks) {
  engine::AttemptHead head;
  head.save_id = save_id();
  head.world_size = ranks;
  return engine::attempt_receipt_name(head, rank);
}

void write_file(Storage& storage, const std::string& name, const std::string& text) {
  if (storage.stat(name)) storage.remove(name);
  const auto file = storage.create(name);
  file->append(as_bytes(text));
  file->close();
}

// The data files of a rank.
size_t files_of(Storage& storage, int rank) {
  const std::string part = "__" + std::to_string(rank) + "_";
  const std::vector<std::string> names = storage.list_files();
  return static_cast<size_t>(std::count_if(names.begin(), names.end(), [&](const auto& name) {
    return name.find(part) != std::string::npos;
  }));
}

// True if the call gives a file a name that ends with `end`.
bool names(const StorageCall& call, const std::string& end) {
  return call.op == StorageOp::kRename && call.to.ends_with(end);
}

// A disk that does `action` instead of the first call that `when` selects.
std::shared_ptr<FaultDisk> failing_once(const std::shared_ptr<Storage>& inner,
                                        const std::function<bool(const StorageCall&)>& when,
                                        const FaultAction& action) {
  const auto done = std::make_shared<bool>(false);
  return FaultDisk::create(inner, [=](const StorageCall& call) {
    if (*done || !when(call)) return FaultAction::pass();
    *done = true;
    return action;
  });
}

// ---- What the other ranks learn

// A rank fails at any of its calls before it begins to write. `joined_before`: rank 0 has joined.
void expect_error_of_joining(bool joined_before) {
  int failures = 0;
  for (uint64_t at = 0;; ++at) {
    const auto inner = memory_storage();
    if (joined_before) save(row_state(0, 2), Location(inner), by_files(0, 2));
    const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
      return call.index == at ? FaultAction::fail(EIO) : FaultAction::pass();
    });
    bool failed = false, joined = false;
    try {
      begin_save(row_state(1, 2), Location(disk->storage()), by_files(1, 2));
      joined = disk->calls() <= at;
    } catch (const Error&) {
      failed = true;
    }
    if (joined) break;
    if (!failed) continue;  // calls that may fail, such as those for a claim
    ++failures;
    const auto left = engine::read_failed(*inner, save_id());
    ASSERT_TRUE(left) << "call " << at;
    EXPECT_EQ(left->rank(), 1);
    EXPECT_EQ(left->code(), ErrorCode::kIo) << left->what();
  }
  EXPECT_GT(failures, 3);
}

TEST(SaveByFilesFailures, TheErrorOfARankThatFailsWhileItJoinsReachesThoseThatHaveJoined) {
  expect_error_of_joining(true);
}
TEST(SaveByFilesFailures, TheErrorOfARankThatFailsWhileItJoinsReachesThoseThatJoinLater) {
  expect_error_of_joining(false);
}

TEST(SaveByFilesFailures, TheErrorInOneRanksOptionsReachesTheOthers) {
  const std::vector<std::function<void(SaveOptions&)>> wrong = {
      [](SaveOptions& options) { options.resources.threads = -1; },
      [](SaveOptions& options) { options.resources.buffer_bytes = 1; },
      [](SaveOptions& options) { options.resources.files_per_rank = 0; },
      [](SaveOptions& options) { options.timeout = -1; },
      [](SaveOptions& options) { options.copies.emplace(); },
  };
  for (const auto& spoil : wrong) {
    const auto storage = memory_storage();
    save(row_state(0, 2), Location(storage), by_files(0, 2));
    SaveOptions options = by_files(1, 2);
    spoil(options);
    const Error error = error_of([&] { save(row_state(1, 2), Location(storage), options); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    const auto left = engine::read_failed(*storage, save_id());
    ASSERT_TRUE(left) << error.what();
    EXPECT_EQ(left->rank(), 1);
    EXPECT_EQ(left->message(), error.message());
  }
}

// ---- What ends a save that nobody can publish

// Rank 0 has a replica of "w" and requests replica names; rank 1 has a tensor with one of these
// names.
void save_names_that_meet(const Location& location, int rank, bool wait) {
  SaveOptions options = by_files(rank, 2, kToken, wait);
  options.dialect = megatron_dialect();
  options.tp_replica_names = rank == 0;
  StateDict state;
  const auto add = [&](const std::string& key, int replica) {
    state[key] =
        ShardedTensor::from_rank_offsets(key, counting(DType::kFloat32, {4}), {}, {0, replica, 0});
  };
  add("w", rank == 0 ? 1 : 0);
  if (rank == 1) add("w.__tp_replica_0", 0);
  save(state, location, options);
}

TEST(SaveByFilesFailures, NamesOfReplicasThatAreAlsoKeysEndTheSave) {
  const auto storage = memory_storage();
  const Location location(storage);
  save_names_that_meet(location, 0, false);
  const Error error = error_of([&] { save_names_that_meet(location, 1, false); });
  ASSERT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
  const auto left = engine::read_failed(*storage, save_id());
  ASSERT_TRUE(left);
  EXPECT_EQ(left->message(), error.message());
  const auto found = find_unpublished(location);
  ASSERT_EQ(found.size(), 1u);
  expect_in(error.message(), found.front().text);
  EXPECT_TRUE(found.front().abandoned);
}

TEST(SaveByFilesFailures, AHeadThatIsLargerThanAnyIsADamagedOneAndNotRead) {
  const std::string large(engine::kMaxSmallFile + 1, 'x'), name = engine::attempt_name(save_id());
  const auto storage = memory_storage();
  const Location location(storage);
  save(row_state(0, 2), location, by_files(0, 2));
  write_file(*storage, name, large);
  const Error error = error_of([&] { save(row_state(1, 2), location, by_files(1, 2)); });
  EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
  EXPECT_EQ(error.file(), name);
  expect_in(std::to_string(engine::kMaxSmallFile), error.what());
  ASSERT_EQ(find_unpublished(location).size(), 1u);
  EXPECT_EQ(abandon(location, {.period = 0}), save_id());
}

// ---- Receipts

// The first answer of a file server may be lost.
TEST(SaveByFilesFailures, AReceiptThatIsWrittenAndSyncedCountsWhateverTheCallReturns) {
  const auto inner = memory_storage();
  save(row_state(0, 2), Location(inner), by_files(0, 2));
  const auto disk = failing_once(
      inner, [](const StorageCall& call) { return names(call, "/1.report"); },
      FaultAction::fail_after(EIO));
  EXPECT_TRUE(save(row_state(1, 2), Location(disk->storage()), by_files(1, 2)).published);
  expect_rows(Location(inner), 3, 2);
}

// Another process makes the file `name` just before one of these ranks does, and dies before the
// file is durable.
void expect_synced_after_others_made(const std::string& name, const std::vector<int>& ranks) {
  const auto inner = memory_storage();
  bool made = false, synced = false, removed_before = false;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (names(call, name) && !std::exchange(made, true)) {
      const Bytes bytes = read_file(*inner, std::string(call.name), UINT64_MAX);
      write_file(*inner, std::string(call.to), std::string(as_text(bytes)));
    }
    const std::string directory = ".tilestone/" + save_id() + "/0";
    synced |= made && call.op == StorageOp::kSettle && call.name == directory;
    const bool removes = call.op == StorageOp::kRemove && call.name.ends_with(".report");
    removed_before |= made && removes && !synced;
    return FaultAction::pass();
  });
  for (const int rank : ranks) {
    save(row_state(rank, 4), Location(disk->storage(rank)), by_files(rank, 4));
  }
  EXPECT_TRUE(made && synced) << name;
  EXPECT_FALSE(removed_before) << name;
}

TEST(SaveByFilesFailures, WhatAnotherProcessHasMadeIsSyncedBeforeReceiptsGo) {
  expect_synced_after_others_made("/merged", {0, 1});
  expect_synced_after_others_made("/0.report", {0});
}

TEST(SaveByFilesFailures, WhoCannotLeaveItsReceiptTakesItsFilesAway) {
  const auto inner = memory_storage();
  const auto disk = failing_once(
      inner, [](const StorageCall& call) { return names(call, "/1.report"); },
      FaultAction::fail(EIO));
  save(row_state(0, 2), Location(inner), by_files(0, 2));
  ASSERT_EQ(files_of(*inner, 0), 1u);
  error_of([&] { save(row_state(1, 2), Location(disk->storage()), by_files(1, 2)); });
  EXPECT_FALSE(inner->stat(receipt_of(1, 2)));
  EXPECT_EQ(files_of(*inner, 1), 0u);
  EXPECT_TRUE(engine::read_failed(*inner, save_id()));
}

// If the disk does not answer, it is unknown whether the receipt exists.
TEST(SaveByFilesFailures, ARankWhoseReceiptMayExistKeepsItsFiles) {
  const auto inner = memory_storage();
  bool named = false;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (named) return FaultAction::fail(EIO);
    named = names(call, "/1.report");
    return named ? FaultAction::fail_after(EIO) : FaultAction::pass();
  });
  save(row_state(0, 2), Location(inner), by_files(0, 2));
  error_of([&] { save(row_state(1, 2), Location(disk->storage()), by_files(1, 2)); });
  EXPECT_EQ(files_of(*inner, 1), 1u);
  EXPECT_TRUE(save(row_state(1, 2), Location(inner), by_files(1, 2)).published);
  EXPECT_EQ(files_of(*inner, 1), 1u);
  expect_rows(Location(inner), 3, 2);
}

// ---- Signs of life

TEST(SaveByFilesFailures, ARankThatHasBegunShowsThatItWorksUntilItReportsOrLeaves) {
  for (const bool receipts : {false, true}) {
    const auto storage = memory_storage();
    const std::string claim = engine::attempt_directory(save_id()) + "/0/1.claim";
    {
      SteppedSave planned = begin_save(row_state(1, 2), Location(storage), by_files(1, 2));
      EXPECT_TRUE(storage->is_claimed(claim));
      EXPECT_EQ(find_unpublished(Location(storage), {.watch = 1e-3}).front().alive, true);
      EXPECT_THROW(abandon(Location(storage), {.period = 0}), Error);
      if (receipts) {
        SteppedSave written = planned.stage().write();
        EXPECT_TRUE(storage->is_claimed(claim));
        written.report();
      }
    }
    EXPECT_FALSE(storage->stat(claim));
    EXPECT_EQ(storage->stat(receipt_of(1, 2)).has_value(), receipts);
  }
}

// ---- Saves with a communicator

TEST(SaveByFilesFailures, ARankLocalOneWhosePublishingDiedStandsAndIsPublishedOrReplaced) {
  for (const bool replaced : {false, true}) {
    const auto inner = memory_storage();
    const Location location(inner);
    for (const int rank : {0, 1}) save(row_state(rank, 2), location, rank_local(rank, 2));
    const auto disk = failing_once(
        inner, [](const StorageCall& call) { return names(call, ".metadata"); },
        FaultAction::die());
    error_of([&] { publish(Location(disk->storage())); });
    expect_rows(location, 3, 2);
    SaveOptions over;
    over.overwrite = true;
    if (replaced)
      save(row_state(0, 1, 9), location, over);
    else
      publish(location);
    expect_rows(location, replaced ? 9 : 3, replaced ? 1 : 2);
    EXPECT_FALSE(inner->stat("__0.metadata"));
  }
}

}  // namespace tilestone::save_by_files_failures_test
