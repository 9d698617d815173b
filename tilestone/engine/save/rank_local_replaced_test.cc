// Rank-local checkpoints of saves by files that are replaced as a whole, or of which ranks are
// missing.
#include <gtest/gtest.h>

#include <cerrno>
#include <string>

#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::rank_local_replaced_test {

constexpr int kRanks = 3;

StateDict other_state() {
  StateDict state;
  state["step"] = Value(int64_t{5});
  return state;
}

SaveOptions over(bool megatron = false) {
  SaveOptions options;
  options.overwrite = true;
  options.resources.threads = 1;
  if (megatron) options.dialect = megatron_dialect();
  return options;
}

std::shared_ptr<Storage> saved(const std::shared_ptr<Storage>& storage) {
  for (int rank = 0; rank < kRanks; ++rank) {
    save(row_state(rank, kRanks), Location(storage), rank_local(rank, kRanks));
  }
  return storage;
}

std::vector<std::string> names_of_attempts(Storage& storage) {
  std::vector<std::string> names;
  for (const std::string& name : storage.list(".tilestone/")) {
    if (name.ends_with(".attempt") || name.ends_with("/merged")) names.push_back(name);
  }
  return names;
}

void expect_replaced(const std::shared_ptr<Storage>& storage) {
  const Location location(storage);
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_FALSE(checkpoint.metadata().rank_local);
  EXPECT_EQ(step_of(checkpoint), Value(int64_t{5}));
  EXPECT_TRUE(names_of_attempts(*storage).empty());
  EXPECT_TRUE(find_leftovers(location).empty());
  EXPECT_TRUE(find_unpublished(location).empty());
}

TEST(RankLocalReplaced, WhatADeadSaveHasReplacedAndWhatCantBeRemovedIsReplacedOnceMore) {
  const auto storage = saved(memory_storage());
  const auto first = FaultDisk::create(storage, [](const StorageCall& call) {
    return call.op == StorageOp::kRemove ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  save(other_state(), Location(first->storage()), over());
  ASSERT_TRUE(storage->stat("__0.metadata"));
  bool failed = false;
  const auto second = FaultDisk::create(storage, [&](const StorageCall& call) {
    if (failed || call.op != StorageOp::kRemove || call.name != "__0.metadata") {
      return FaultAction::pass();
    }
    failed = true;
    return FaultAction::fail(EIO);
  });
  save(other_state(), Location(second->storage()), over());
  EXPECT_TRUE(failed);
  expect_replaced(storage);
}

TEST(RankLocalReplaced, AnOverwritingSaveReplacesACompleteOneThatWasNeverPublished) {
  const auto storage = saved(memory_storage());
  save(other_state(), Location(storage), over());
  expect_replaced(storage);
  EXPECT_TRUE(storage->list_directories(".tilestone/").empty());
  save(other_state(), Location(storage), over());
  expect_replaced(storage);
}

TEST(RankLocalReplaced, OneWithFixedNamesReplacesItAsAWhole) {
  const TempDirectory folder;
  const auto storage = saved(posix_storage(folder.path() + "/ckpt"));
  save(other_state(), Location(storage), over(true));
  expect_replaced(posix_storage(folder.path() + "/ckpt"));
}

TEST(RankLocalReplaced, OneOfWhichARankIsMissingIsNotReplaced) {
  const auto storage = memory_storage();
  save(row_state(0, kRanks), Location(storage), rank_local(0, kRanks));
  const FileImage before = memory_image(*storage);
  try {
    save(other_state(), Location(storage), over());
    ADD_FAILURE() << "the save replaced it";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists) << error.what();
  }
  EXPECT_EQ(memory_image(*storage), before);
}

TEST(RankLocalReplaced, WhereverTheSaveDiesTheOldOneOrTheNewOneStandsAndTheNextSaveGoesOn) {
  const FileImage image = memory_image(*saved(memory_storage()));
  bool died = true;
  int old = 0, replaced = 0;
  for (int at = 1; died; ++at) {
    const auto storage = memory_storage(image);
    int calls = 0;
    const auto disk = FaultDisk::create(storage, [&](const StorageCall&) {
      return ++calls == at ? FaultAction::die() : FaultAction::pass();
    });
    const LoggedWarnings quiet;
    try {
      save(other_state(), Location(disk->storage()), over());
      died = calls >= at;  // what follows the switch does not make the save fail
    } catch (const Error&) {
    }
    const Checkpoint checkpoint = Checkpoint::open(Location(storage));
    EXPECT_TRUE(checkpoint.verify().ok()) << at;
    checkpoint.metadata().rank_local ? ++old : ++replaced;
    if (checkpoint.metadata().rank_local) {
      expect_rows(Location(storage), 3, kRanks);
    } else {
      EXPECT_EQ(step_of(checkpoint), Value(int64_t{5})) << at;
    }
    save(other_state(), Location(storage), over());
    expect_replaced(storage);
  }
  EXPECT_GT(old, 0);
  EXPECT_GT(replaced, 1);
}

TEST(RankLocalReplaced, OneOfWhichARanksMetadataIsDamagedIsReplaced) {
  FileImage image = without_tilestones_files(memory_image(*saved(memory_storage())));
  image.at("__1.metadata").resize(10);
  const auto storage = memory_storage(image);
  EXPECT_THROW(Checkpoint::open(Location(storage)), Error);
  const LoggedWarnings quiet;
  save(other_state(), Location(storage), over());
  expect_replaced(storage);
  EXPECT_FALSE(storage->stat("__0.metadata") || storage->stat("__1.metadata"));
}

// As stock torch leaves it: in either mode it saves over a checkpoint of the other mode.
TEST(RankLocalReplaced, BothKindsSideBySideAreReplaced) {
  const auto ordinary = memory_storage();
  save(row_state(0, 1), Location(ordinary));
  FileImage image = without_tilestones_files(memory_image(*saved(memory_storage())));
  image[".metadata"] = memory_image(*ordinary).at(".metadata");
  const auto storage = memory_storage(image);
  EXPECT_THROW(Checkpoint::open(Location(storage)), Error);
  const LoggedWarnings quiet;
  save(other_state(), Location(storage), over());
  expect_replaced(storage);
  EXPECT_FALSE(storage->stat("__0.metadata") || storage->stat(".tilestone/replaced"));
}

// As stock leaves it: beside a data file of a rank whose metadata is missing.
TEST(RankLocalReplaced, ARankLoadsItsOwnPartThoughOtherRanksHaveNoMetadata) {
  FileImage image = without_tilestones_files(memory_image(*saved(memory_storage())));
  image.erase("__0.metadata");
  const StateDict wanted = row_state(1, kRanks, 70);
  LoadOptions own;
  own.own_rank = 1;
  EXPECT_EQ(load(wanted, Location(memory_storage(image)), own).get<Value>("step"),
            Value(int64_t{3}));
}

}  // namespace tilestone::rank_local_replaced_test
