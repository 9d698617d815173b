// Saves without a communicator while another save, with or without one, begins or fails at the same
// location.
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::save_by_files_beside_test {

constexpr const char* kOther = "another run of it";

class SaveByFilesBeside : public testing::Test {
 protected:
  void SetUp() override { set_log_level(LogLevel::kError); }
  void TearDown() override { set_log_level(LogLevel::kWarning); }
};

std::string id_of(uint64_t number = 0) { return engine::save_id_of(kToken, number); }

void expect_error(ErrorCode code, const std::string& text, const std::function<void()>& body) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

bool gives_name(const StorageCall& call, std::string_view ending) {
  return call.op == StorageOp::kRename && call.to.ends_with(ending);
}

// ---- Beside a save with a communicator

// The storage has no locks. Rank 0 of 2 begins when the other save is about to rename its file to
// this name. That save then ends with an error, and rank 1 completes the checkpoint.
void expect_looks_again(const SaveOptions& options, std::string_view at) {
  const auto root = memory_storage();
  const auto inner = root->child("checkpoint");
  inner->directories()->make(
      std::string(engine::kTilestoneDirectory));  // so that the location is not empty
  bool begun = false;
  const auto disk = FaultDisk::create(root, [&](const StorageCall& call) {
    if (call.op == StorageOp::kLock) return FaultAction::fail(ENOTSUP);
    if (begun || !gives_name(call, at)) return FaultAction::pass();
    begun = true;
    save(row_state(0, 2), Location(inner), by_files(0, 2));
    return FaultAction::pass();
  });
  expect_error(ErrorCode::kAlreadyExists, "without a communicator, is not published yet", [&] {
    save(row_state(0, 1, 9), Location(disk->storage()->child("checkpoint")), options);
  });
  EXPECT_TRUE(begun);
  EXPECT_TRUE(save(row_state(1, 2), Location(inner), by_files(1, 2)).published);
  expect_rows(Location(inner), 3, 2);
}

TEST_F(SaveByFilesBeside, ASaveWithACommunicatorLooksForOthersAgainBeforeItsSwitch) {
  for (const bool overwrite : {false, true}) {
    SaveOptions options;
    options.overwrite = overwrite;
    options.resources.threads = 1;
    expect_looks_again(options, manifest_name("").substr(manifest_name("").rfind('.')));
    options.dialect = megatron_dialect();
    expect_looks_again(options, "metadata.json");
  }
}

// The save with a communicator takes the lock after the first rank has looked for it, and has not
// looked for attempts yet.
TEST_F(SaveByFilesBeside, AFirstRankLooksForTheLockAgainOnceItsHeadExists) {
  const auto inner = memory_storage();
  std::unique_ptr<StorageClaim> lock;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (gives_name(call, ".attempt")) lock = inner->claim(std::string(engine::kLockName));
    return FaultAction::pass();
  });
  expect_error(ErrorCode::kAlreadyExists, "a save with a communicator is under way",
               [&] { save(row_state(0, 2), Location(disk->storage()), by_files(0, 2)); });
  const auto failed = engine::read_failed(*inner, id_of());  // for the other rank
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code(), ErrorCode::kAlreadyExists);
}

// ---- Beside a rank-local save

TEST_F(SaveByFilesBeside, AnOrdinarySaveDoesNotBeginBesideAnOpenRankLocalOne) {
  const Location location(memory_storage());
  save(row_state(0, 2), location, rank_local(0, 2));
  expect_error(ErrorCode::kAlreadyExists, "the save " + id_of() + " at ",
               [&] { save(row_state(0, 2), location, by_files(0, 2, kOther)); });
}

// Rank 1 writes when rank 0 is about to end the save.
TEST_F(SaveByFilesBeside, ARankLocalSaveThatFailsHasNoMetadataAtAnyTime) {
  const auto inner = memory_storage();
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (gives_name(call, ".outcome")) {
      save(row_state(1, 2), Location(inner), rank_local(1, 2, 0));
    }
    EXPECT_FALSE(inner->stat("__0.metadata") || inner->stat("__1.metadata"));
    return FaultAction::pass();
  });
  expect_error(ErrorCode::kInvalidArgument, "hollow",
               [&] { save(hollow_state(), Location(disk->storage()), rank_local(0, 2, 0)); });
  EXPECT_FALSE(inner->stat("__1.metadata"));
  for (const int rank : {0, 1}) save(row_state(rank, 2), Location(inner), rank_local(rank, 2, 1));
  expect_rows(Location(inner), 3, 2);
}

// ---- Durability

// Rank 0 dies after it has made the head and before the head is durable.
TEST_F(SaveByFilesBeside, TheHeadIsDurableBeforeTheDataOfRanksThatFoundItThere) {
  const auto disk = FaultDisk::create(memory_storage(), [&](const StorageCall& call) {
    if (gives_name(call, ".report")) return FaultAction::crash();
    return gives_name(call, ".attempt") ? FaultAction::die_after() : FaultAction::pass();
  });
  EXPECT_THROW(save(row_state(0, 2), Location(disk->storage(0)), by_files(0, 2)), Error);
  EXPECT_THROW(save(row_state(1, 2), Location(disk->storage(1)), by_files(1, 2)), Error);
  const auto after = memory_storage(disk->surviving_image(Survival::kNothingUnsynced));
  EXPECT_TRUE(after->stat(data_file_name(id_of(), 1, 0)));
  EXPECT_TRUE(after->stat(engine::attempt_name(id_of())));
}

}  // namespace tilestone::save_by_files_beside_test
