#include "tilestone/storage/fault_storage_testing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <set>
#include <thread>

#include "tilestone/storage/directories.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::fault_storage_test {

using Names = std::vector<std::string>;
const Deadline kNever = Deadline::never();

// A hook that answers `action` to the calls of one kind and passes all others.
FaultHook on(StorageOp op, FaultAction action) {
  return [=](const StorageCall& call) { return call.op == op ? action : FaultAction::pass(); };
}

Names names_of(const FileImage& image) {
  Names names;
  for (const auto& [name, bytes] : image) names.push_back(name);
  return names;
}

std::string text_of(const FileImage& image, const std::string& name) {
  const auto found = image.find(name);
  return found == image.end() ? "(absent)" : std::string(as_text(found->second));
}

TEST(FaultDisk, CountsAndNamesEveryCall) {
  std::vector<std::string> seen;
  const auto disk = FaultDisk::create(memory_storage(), [&](const StorageCall& call) {
    EXPECT_EQ(call.index, seen.size());
    EXPECT_EQ(call.client, 3);
    seen.push_back(std::string(to_string(call.op)) + " " + std::string(call.name) +
                   (call.to.empty() ? "" : " " + std::string(call.to)));
    return FaultAction::pass();
  });
  disk->storage(3)->publish("f", "t", as_bytes("abc"), true, kNever);
  EXPECT_EQ(seen, (Names{"create t", "append t", "sync t", "close t", "rename t f", "settle "}));
  EXPECT_EQ(disk->calls(), 6u);
}

TEST(FaultDisk, ARequestIsExecutedAfterItsErrorWasReported) {
  const auto memory = memory_storage({{"a", to_bytes("A")}, {"b", to_bytes("B")}});
  const auto disk = FaultDisk::create(memory, [](const StorageCall& call) {
    if (call.op == StorageOp::kRename) return FaultAction::fail_late(EIO, 2);
    return call.op == StorageOp::kRemove ? FaultAction::fail_late(EIO, 100) : FaultAction::pass();
  });
  const auto storage = disk->storage();
  expect_error([&] { storage->rename("a", "c", false); }, ErrorCode::kIo, "injected");
  EXPECT_EQ(storage->list(), (Names{"a", "b"}));
  EXPECT_EQ(storage->list(), (Names{"b", "c"}));
  expect_error([&] { storage->remove("b"); }, ErrorCode::kIo, "injected");
  EXPECT_EQ(storage->list(), (Names{"b", "c"}));
  disk->execute_late();
  EXPECT_EQ(storage->list(), Names{"c"});
  EXPECT_EQ(names_of(disk->surviving_image(Survival::kNothingUnsynced)), (Names{"a", "b"}));
}

TEST(FaultDisk, ARequestThatIsExecutedTwiceReportsItsSecondAnswer) {
  const auto memory = memory_storage({{"a", to_bytes("A")}, {"b", to_bytes("B")}});
  const auto disk = FaultDisk::create(memory, [](const StorageCall& call) {
    return changes_storage(call.op) ? FaultAction::repeat() : FaultAction::pass();
  });
  const auto storage = disk->storage();
  expect_error([&] { storage->rename("a", "c", false); }, ErrorCode::kNotFound, "a");
  storage->remove("b");
  expect_error([&] { storage->create("d"); }, ErrorCode::kAlreadyExists, "d");
  EXPECT_EQ(storage->list(), (Names{"c", "d"}));
}

TEST(FaultDisk, AFailureHasTheErrnoAndTheNameAndLeavesNoTemporaryFile) {
  for (const StorageOp op : {StorageOp::kCreate, StorageOp::kAppend, StorageOp::kSync,
                             StorageOp::kClose, StorageOp::kRename}) {
    SCOPED_TRACE(to_string(op));
    const auto memory = memory_storage({{"f", to_bytes("old")}});
    const auto disk = FaultDisk::create(memory, on(op, FaultAction::fail(ENOSPC)));
    try {
      disk->storage()->publish("f", "t", as_bytes("new"), true, kNever);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      EXPECT_EQ(error.sys_errno(), ENOSPC);
      EXPECT_EQ(error.file(), "t");
    }
    EXPECT_EQ(memory->list(), Names{"f"});
    EXPECT_EQ(as_text(read_file(*memory, "f", 9)), "old");
  }
}

TEST(FaultDisk, AListingThatLagsShowsWhatWasRemovedAndNothingThatIsNew) {
  for (const auto make : {&memory_storage, &memory_objects}) {
    const auto disk = FaultDisk::create(make({{"a", {}}, {"d/b", {}}}));
    const auto storage = disk->storage();
    const FileImage before = {{"a", {}}, {"d/b", {}}};
    storage->remove("d/b");
    put_file(*storage, "c", as_bytes("c"));
    EXPECT_THAT(storage->list(), testing::ElementsAre("a", "c"));
    disk->lag_listings(before);
    EXPECT_THAT(storage->list(), testing::ElementsAre("a", "d/b"));
    EXPECT_FALSE(storage->stat("d/b"));
    EXPECT_TRUE(storage->stat("c"));
  }
}

TEST(FaultDisk, ACallCanFailAfterItsWork) {
  const auto memory = memory_storage();
  const auto disk = FaultDisk::create(memory, on(StorageOp::kCreate, FaultAction::fail_after(EIO)));
  expect_error([&] { disk->storage()->create("f"); }, ErrorCode::kIo, "f");
  EXPECT_TRUE(memory->stat("f").has_value());
}

TEST(FaultDisk, ATornAppendWritesItsFirstBytes) {
  const auto memory = memory_storage();
  const auto disk = FaultDisk::create(memory, on(StorageOp::kAppend, FaultAction::tear(2, EIO)));
  const auto file = disk->storage()->create("f");
  expect_error([&] { file->append(as_bytes("abcdef")); }, ErrorCode::kIo, "f");
  EXPECT_EQ(as_text(read_file(*memory, "f", 9)), "ab");
}

TEST(FaultDisk, DroppedWorkIsReportedAsDone) {
  const auto memory = memory_storage({{"a", to_bytes("A")}});
  std::set<StorageOp> dropped = {StorageOp::kAppend};
  const auto disk = FaultDisk::create(memory, [&](const StorageCall& call) {
    return dropped.contains(call.op) ? FaultAction::drop() : FaultAction::pass();
  });
  const auto storage = disk->storage();
  put_file(*storage, "f", as_bytes("abc"));
  EXPECT_EQ(read_file(*memory, "f", 9), Bytes(3));  // zeros
  dropped = {StorageOp::kRemove, StorageOp::kRename, StorageOp::kCreate, StorageOp::kRead};
  storage->remove("a");
  storage->rename("a", "b", true);
  put_file(*storage, "nowhere", as_bytes("abc"));
  EXPECT_EQ(memory->list(), (Names{"a", "f"}));
  EXPECT_EQ(as_text(read_file(*storage, "a", 9)), "A");  // reads are not dropped
}

TEST(FaultDisk, AReadCanFailByName) {
  const auto disk = FaultDisk::create(
      memory_storage({{"a", to_bytes("A")}, {"b", to_bytes("B")}}), [](const StorageCall& call) {
        return call.op == StorageOp::kRead && call.name == "b" ? FaultAction::fail(EIO)
                                                               : FaultAction::pass();
      });
  EXPECT_EQ(as_text(read_file(*disk->storage(), "a", 9)), "A");
  expect_error([&] { read_file(*disk->storage(), "b", 9); }, ErrorCode::kIo, "b");
}

TEST(FaultDisk, AfterACrashNobodyDoesAnything) {
  const auto memory = memory_storage();
  const auto disk = FaultDisk::create(memory, on(StorageOp::kSync, FaultAction::crash()));
  const auto one = disk->storage(1), two = disk->storage(2);
  const auto other = two->create("other");
  expect_error([&] { put_file(*one, "f", as_bytes("abc")); }, ErrorCode::kIo, "machine is dead");
  EXPECT_TRUE(disk->crashed());
  const uint64_t calls = disk->calls();
  expect_error([&] { other->append(as_bytes("x")); }, ErrorCode::kIo, "machine is dead");
  expect_error([&] { two->stat("f"); }, ErrorCode::kIo, "machine is dead");
  EXPECT_EQ(disk->calls(), calls);
  EXPECT_EQ(memory->stat("other")->size, 0u);
}

TEST(FaultDisk, AKilledClientLosesItsLocksAndOthersGoOn) {
  const auto disk = FaultDisk::create(memory_storage(), on(StorageOp::kSync, FaultAction::die()));
  const auto one = disk->storage(1), two = disk->storage(2);
  const auto lock = one->claim("lock");
  EXPECT_EQ(two->claim("lock"), nullptr);
  expect_error([&] { put_file(*one, "f", as_bytes("abc")); }, ErrorCode::kIo, "process is dead");
  expect_error([&] { one->stat("f"); }, ErrorCode::kIo, "process is dead");
  EXPECT_NE(two->claim("lock"), nullptr);
  EXPECT_EQ(as_text(read_file(*two, "f", 9)), "abc");
}

TEST(FaultDisk, ADelayedCallIsStillDone) {
  const auto disk = FaultDisk::create(
      memory_storage(), on(StorageOp::kCreate, FaultAction::wait(std::chrono::milliseconds(1))));
  put_file(*disk->storage(), "f", as_bytes("abc"));
  EXPECT_EQ(as_text(read_file(*disk->storage(), "f", 9)), "abc");
}

TEST(FaultDisk, PowerLossNeedsMemory) {
  const TempDirectory directory;
  const auto disk = FaultDisk::create(posix_storage(directory.path()));
  put_file(*disk->storage(), "f", as_bytes("abc"));
  EXPECT_EQ(as_text(read_file(*disk->storage(), "f", 9)), "abc");
  expect_error([&] { disk->surviving_image(Survival::kAll); }, ErrorCode::kInvalidArgument);
}

TEST(PowerLoss, UnsyncedBytesMayBeMissingZeroOrTorn) {
  const auto disk = FaultDisk::create(memory_storage());
  const auto storage = disk->storage();
  const Bytes bytes = pattern_bytes(10'000, 1);
  const auto file = storage->create("f");
  file->append(ByteView(bytes).first(5000));
  file->sync(kNever);
  file->append(ByteView(bytes).subspan(5000));
  storage->settle("");
  const ByteView synced = ByteView(bytes).first(5000);
  EXPECT_EQ(disk->surviving_image(Survival::kAll).at("f"), bytes);
  EXPECT_EQ(disk->surviving_image(Survival::kNoUnsyncedEntries).at("f"), bytes);
  EXPECT_EQ(text_of(disk->surviving_image(Survival::kNoUnsyncedData), "f"), as_text(synced));
  EXPECT_EQ(text_of(disk->surviving_image(Survival::kNothingUnsynced), "f"), as_text(synced));
  std::set<Bytes> seen;
  for (const Survival survival : kAllSurvivals) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      const Bytes left = disk->surviving_image(survival, seed).at("f");
      ASSERT_GE(left.size(), synced.size());
      ASSERT_LE(left.size(), bytes.size());
      ASSERT_TRUE(std::equal(synced.begin(), synced.end(), left.begin()));
      for (size_t i = 0; i < left.size(); ++i) {
        ASSERT_TRUE(left[i] == bytes[i] || left[i] == std::byte{0});
      }
      seen.insert(left);
    }
  }
  EXPECT_GT(seen.size(), 100u);
}

TEST(PowerLoss, UnsyncedNamesMayBeOldOrNew) {
  const auto disk = FaultDisk::create(
      memory_storage({{"kept", to_bytes("K")}, {"old", to_bytes("O")}, {"to", to_bytes("T")}}));
  const auto storage = disk->storage();
  put_file(*storage, "new", as_bytes("N"));
  storage->rename("old", "to", true);
  storage->remove("kept");
  const FileImage none = disk->surviving_image(Survival::kNothingUnsynced);
  EXPECT_EQ(names_of(none), (Names{"kept", "old", "to"}));
  EXPECT_EQ(text_of(none, "to"), "T");
  const FileImage all = disk->surviving_image(Survival::kAll);
  EXPECT_EQ(names_of(all), (Names{"new", "to"}));
  EXPECT_EQ(text_of(all, "to"), "O");
  std::set<Names> seen;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const FileImage image = disk->surviving_image(Survival::kRandom, seed);
    // A rename is atomic: either both names have changed or neither has.
    EXPECT_EQ(text_of(image, "to"), image.contains("old") ? "T" : "O") << "seed " << seed;
    seen.insert(names_of(image));
  }
  EXPECT_EQ(seen.size(), 8u);
  storage->settle("");
  EXPECT_EQ(names_of(disk->surviving_image(Survival::kNothingUnsynced)), (Names{"new", "to"}));
}

TEST(PowerLoss, AFileIsMissingWhileItsDirectoryIsNotDurable) {
  const auto disk = FaultDisk::create(memory_storage());
  const auto storage = disk->storage();
  storage->directories()->make("a/b");
  put_file(*storage, "a/b/f", as_bytes("F"));
  const auto left = [&] { return names_of(disk->surviving_image(Survival::kNoUnsyncedEntries)); };
  storage->settle("a/b");
  EXPECT_EQ(left(), Names{});
  storage->settle("");
  EXPECT_EQ(left(), Names{});
  storage->settle("a");
  EXPECT_EQ(left(), Names{"a/b/f"});
}

TEST(PowerLoss, ARenameAcrossDirectoriesComesWhole) {
  const auto disk = FaultDisk::create(memory_storage({{"a/x", {}}, {"b/y", {}}}));
  const auto storage = disk->storage();
  put_file(*storage, "a/f", as_bytes("F"));
  put_file(*storage, "a/g", as_bytes("G"));
  storage->rename("a/f", "b/f", false);
  storage->settle("b");
  EXPECT_EQ(names_of(disk->surviving_image(Survival::kNothingUnsynced)),
            (Names{"a/x", "b/f", "b/y"}));
}

// Checks a publish: the file must have its complete old or its complete new content.
using Publish = std::function<void(Storage&)>;

struct CrashCount {
  uint64_t points = 0, old_found = 0, new_found = 0, broken = 0;
};

CrashCount crash_everywhere(const Publish& publish, const std::string& old_text,
                            const std::string& new_text) {
  CrashCount count;
  const FileImage before = {{"f", to_bytes(old_text)}};
  const auto whole = FaultDisk::create(memory_storage(before));
  publish(*whole->storage());
  const FaultAction ways[] = {FaultAction::crash(), FaultAction::crash_after(),
                              FaultAction::crash_torn(1), FaultAction::crash_torn(700)};
  for (uint64_t index = 0; index < whole->calls(); ++index) {
    for (const FaultAction& way : ways) {
      const auto disk = FaultDisk::create(memory_storage(before), [&](const StorageCall& call) {
        return call.index == index ? way : FaultAction::pass();
      });
      EXPECT_THROW(publish(*disk->storage()), Error);
      for (const Survival survival : kAllSurvivals) {
        for (uint64_t seed = 0; seed < 20; ++seed) {
          const std::string found = text_of(disk->surviving_image(survival, seed), "f");
          ++count.points;
          count.old_found += found == old_text;
          count.new_found += found == new_text;
          count.broken += found != old_text && found != new_text;
        }
      }
    }
  }
  return count;
}

TEST(PowerLoss, PublishFileLeavesOldOrNewAtEveryCrashPoint) {
  const std::string new_text(2000, 'n');
  const CrashCount count = crash_everywhere(
      [&](Storage& storage) { storage.publish("f", "t", as_bytes(new_text), true, kNever); }, "old",
      new_text);
  EXPECT_EQ(count.broken, 0u);
  EXPECT_EQ(count.points, 6u * 4 * 8 * 20);
  EXPECT_GT(count.old_found, 0u);
  EXPECT_GT(count.new_found, 0u);
}

TEST(PowerLoss, APublishWithoutSyncIsFoundOut) {
  const std::string new_text(2000, 'n');
  const CrashCount count = crash_everywhere(
      [&](Storage& storage) {
        const auto file = storage.create("t");
        file->append(as_bytes(new_text));
        file->close();
        storage.rename("t", "f", true);
        storage.settle("");
      },
      "old", new_text);
  EXPECT_GT(count.broken, 0u);
}

TEST(PowerLoss, APublishInPlaceIsFoundOut) {
  const CrashCount count = crash_everywhere(
      [&](Storage& storage) {
        storage.remove("f");
        put_file(storage, "f", as_bytes("new"));
        storage.settle("");
      },
      "old", "new");
  EXPECT_GT(count.broken, 0u);
}

FileImage two_checkpoints() {
  return {{"ckpt/index", to_bytes("old")},
          {"ckpt/data", to_bytes("old")},
          {".new/index", to_bytes("new")},
          {".new/data", to_bytes("new")}};
}

TEST(PowerLoss, AnExchangeThatIsNotSyncedIsLostWholeOrNotAtAll) {
  const auto disk =
      FaultDisk::create(memory_storage(two_checkpoints()), [](const StorageCall& call) {
        return call.op == StorageOp::kSettle ? FaultAction::drop() : FaultAction::pass();
      });
  disk->storage()->directories()->exchange("ckpt", ".new");
  std::set<std::string> seen;
  for (const Survival survival : kAllSurvivals) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const FileImage image = disk->surviving_image(survival, seed);
      EXPECT_EQ(image.size(), 4u);
      EXPECT_EQ(text_of(image, "ckpt/index"), text_of(image, "ckpt/data"));
      EXPECT_EQ(text_of(image, ".new/index"), text_of(image, ".new/data"));
      EXPECT_NE(text_of(image, "ckpt/index"), text_of(image, ".new/index"));
      seen.insert(text_of(image, "ckpt/index"));
    }
  }
  EXPECT_EQ(seen, (std::set<std::string>{"old", "new"}));
}

// Replaces "ckpt" by ".new" and removes the old one, with a crash at each point. Counts the images
// in which "ckpt" is not a complete checkpoint.
uint64_t broken_replacements(bool synced) {
  const auto replace = [](Storage& storage) {
    const auto place = storage.child("ckpt")->parent();
    place->storage->directories()->exchange(place->name, ".new");
    place->storage->remove_tree(".new");
    place->storage->settle("");
  };
  const auto whole = FaultDisk::create(memory_storage(two_checkpoints()));
  replace(*whole->storage());
  EXPECT_EQ(whole->surviving_image(Survival::kNothingUnsynced).size(), 2u);
  uint64_t broken = 0;
  for (uint64_t index = 0; index < whole->calls(); ++index) {
    for (const FaultAction& way : {FaultAction::crash(), FaultAction::crash_after()}) {
      const auto disk =
          FaultDisk::create(memory_storage(two_checkpoints()), [&](const StorageCall& call) {
            if (call.index == index) return way;
            const bool drop = !synced && call.op == StorageOp::kSettle;
            return drop ? FaultAction::drop() : FaultAction::pass();
          });
      EXPECT_THROW(replace(*disk->storage()), Error);
      for (const Survival survival : kAllSurvivals) {
        for (uint64_t seed = 0; seed < 20; ++seed) {
          const FileImage image = disk->surviving_image(survival, seed);
          const std::string found = text_of(image, "ckpt/index");
          broken += found == "(absent)" || found != text_of(image, "ckpt/data");
        }
      }
    }
  }
  return broken;
}

TEST(PowerLoss, ADirectoryThatIsReplacedByExchangeIsWholeAtEveryCrashPoint) {
  EXPECT_EQ(broken_replacements(true), 0u);
}

TEST(PowerLoss, AReplacementByExchangeThatIsNotSyncedIsFoundOut) {
  EXPECT_GT(broken_replacements(false), 0u);
}

TEST(PowerLoss, ARenamedDirectoryTakesAlongWhatIsInItDurableOrNot) {
  const auto disk = FaultDisk::create(memory_storage());
  const auto storage = disk->storage();
  storage->directories()->make("tmp/in");
  put_file(*storage, "tmp/f", as_bytes("F"));
  put_file(*storage, "tmp/in/g", as_bytes("G"));
  storage->settle("tmp");
  storage->directories()->rename("tmp", "final");
  const auto left = [&] { return names_of(disk->surviving_image(Survival::kNothingUnsynced)); };
  EXPECT_EQ(left(), Names{"final/f"});
  storage->settle("final/in");
  EXPECT_EQ(left(), (Names{"final/f", "final/in/g"}));
  storage->remove_tree("final");
  EXPECT_EQ(left(), (Names{"final/f", "final/in/g"}));
  storage->settle("");
  EXPECT_EQ(left(), Names{});
}

TEST(FaultDisk, AFailedRemovalOfATreeNamesTheFile) {
  const auto disk =
      FaultDisk::create(memory_storage(two_checkpoints()), [](const StorageCall& call) {
        return call.name == "ckpt/index" ? FaultAction::fail(EACCES) : FaultAction::pass();
      });
  try {
    disk->storage()->remove_tree("ckpt");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.file(), "ckpt/index");
    EXPECT_EQ(error.sys_errno(), EACCES);
  }
}

TEST(FaultDisk, WhatIsTakenAwayIsSaidAndRefused) {
  const auto disk = FaultDisk::create(memory_storage(two_checkpoints()));
  const auto child = disk->storage()->child("ckpt");
  EXPECT_TRUE(child->directories()->can_exchange());
  disk->take_away_exchange();
  EXPECT_FALSE(child->directories()->can_exchange());
  expect_error([&] { disk->storage()->directories()->exchange("ckpt", ".new"); },
               ErrorCode::kUnsupported, "ckpt");
}

TEST(FaultDisk, TheRootOfAChildIsDurableWhenItWasMade) {
  const auto disk = FaultDisk::create(memory_storage());
  const auto child = disk->storage()->child("a/b");
  child->directories()->make("");
  put_file(*child, "f", as_bytes("F"));
  child->settle("");
  EXPECT_EQ(names_of(disk->surviving_image(Survival::kNothingUnsynced)), Names{"a/b/f"});
}

TEST(FaultDisk, ManyClientsAtOnce) {
  std::atomic<uint64_t> asked = 0;
  const auto disk = FaultDisk::create(memory_storage(), [&](const StorageCall&) {
    ++asked;
    return FaultAction::pass();
  });
  std::vector<std::thread> threads;
  for (int client = 0; client < 4; ++client) {
    threads.emplace_back([&, client] {
      const auto storage = disk->storage(client);
      for (int i = 0; i < 50; ++i) {
        const std::string name = std::to_string(client) + "-" + std::to_string(i);
        put_file(*storage, name, as_bytes(name));
        storage->settle("");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(asked, disk->calls());
  EXPECT_EQ(disk->surviving_image(Survival::kNothingUnsynced).size(), 200u);
}

}  // namespace tilestone::fault_storage_test
