#include "tilestone/engine/commit/unpublished.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "tilestone/base/error_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::gc_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAreArray;

constexpr char kDead[] = "01234567-89ab-4cde-8f01-23456789abcd";

// Files that a save with the id kDead made before it was killed, by name and size.
FileImage dead_files() {
  FileImage image;
  const std::string id = kDead;
  image[id + "__0_0.distcp"] = pattern_bytes(700);
  image[id + "__17_2.distcp"] = pattern_bytes(30);
  image[manifest_name(id)] = pattern_bytes(20);
  image[engine::temporary_name(id, "metadata")] = pattern_bytes(4);
  return image;
}

std::vector<std::string> names_of(const std::vector<Leftover>& files) {
  std::vector<std::string> names;
  for (const Leftover& file : files) names.push_back(file.name);
  return names;
}

FileImage with_dead_files(FileImage image) {
  image.merge(dead_files());
  return image;
}

// The save id in the image; "" if there is none.
std::string save_id_in(const FileImage& image) {
  for (const auto& [name, bytes] : image) {
    if (name.ends_with("__0_0.distcp")) return name.substr(0, std::string(kDead).size());
  }
  return "";
}

// The files that `cp FROM/* TO` copies.
FileImage without_hidden_files(FileImage image) {
  std::erase_if(image, [](const auto& file) { return file.first.front() == '.'; });
  return image;
}

void expect_files(const std::shared_ptr<Storage>& storage, const FileImage& image) {
  for (const auto& [name, bytes] : image) {
    EXPECT_TRUE(storage->stat(name) && read_file(*storage, name, UINT64_MAX) == bytes) << name;
  }
}

FileImage saved() {
  const auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    save(row_state(comm, 1), Location(storage), options);
  });
  return memory_image(*storage);
}

FileImage foreign_files() {
  return {{"notes.txt", to_bytes("mine")},
          {"__0_0.distcp", to_bytes("of stock torch")},
          {"sub/" + std::string(kDead) + "__0_0.distcp", to_bytes("elsewhere")},
          {".tilestone/other", to_bytes("unknown")}};
}

std::vector<std::string> dead_names() {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : dead_files()) names.push_back(name);
  return names;
}

TEST(Gc, FindsWhatAFailedSaveLeftAndChangesNothing) {
  FileImage image = with_dead_files(saved());
  image.merge(foreign_files());
  const auto storage = memory_storage(image);
  const auto found = find_leftovers(Location(storage));
  EXPECT_THAT(names_of(found), UnorderedElementsAreArray(dead_names()));
  EXPECT_EQ(memory_image(*storage), image);
}

TEST(Gc, RemovesThatAndNothingElse) {
  FileImage image = saved();
  image.merge(foreign_files());
  const auto storage = memory_storage(with_dead_files(image));
  EXPECT_THAT(names_of(remove_leftovers(Location(storage))),
              UnorderedElementsAreArray(dead_names()));
  EXPECT_EQ(memory_image(*storage), image);
  EXPECT_THAT(find_leftovers(Location(storage)), IsEmpty());
  expect_rows(Location(storage), 1, 2);
}

TEST(Gc, SaysWhatEachFileIsWhyItIsLeftOverAndItsSize) {
  const FileImage image = dead_files();
  const auto alone = find_leftovers(Location(memory_storage(image)));
  ASSERT_EQ(alone.size(), 4u);
  EXPECT_EQ(alone[0].what, std::string("manifest of the save ") + kDead);
  EXPECT_EQ(alone[1].what, std::string("temporary file of the save ") + kDead);
  EXPECT_EQ(alone[2].what, std::string("data file of the save ") + kDead);
  EXPECT_EQ(alone[2].size, 700u);
  EXPECT_EQ(alone[2].why, "there is no checkpoint here: the save was not published");
  const auto beside = find_leftovers(Location(memory_storage(with_dead_files(saved()))));
  EXPECT_THAT(beside[0].why, HasSubstr("the checkpoint here is of the save "));
}

TEST(Gc, ASoundCheckpointHasNoLeftoversAndGetsNoLockFile) {
  FileImage image = saved();
  image.erase(".tilestone/lock");
  const auto storage = memory_storage(image);
  EXPECT_THAT(remove_leftovers(Location(storage)), IsEmpty());
  EXPECT_EQ(memory_image(*storage), image);
}

TEST(Gc, WhileASaveIsUnderWayNothingIsListedOrRemoved) {
  const auto storage = memory_storage(dead_files());
  int refused = 0;
  SaveOptions options;
  options.progress = [&](const Progress&) {
    const FileImage before = memory_image(*storage);
    for (const auto call : {&find_leftovers, &remove_leftovers}) {
      expect_error([&] { call(Location(storage), false); }, ErrorCode::kAlreadyExists,
                   "a save is under way at memory");
      ++refused;
    }
    EXPECT_EQ(memory_image(*storage), before);
  };
  save(row_state(solo(), 1), Location(storage), options);
  EXPECT_GE(refused, 2);
  expect_rows(Location(storage), 1, 1);
}

TEST(Gc, BesideACheckpointThatCantBeReadNothingIsRemoved) {
  FileImage image = with_dead_files(saved());
  image[".metadata"].resize(40);
  const auto storage = memory_storage(image);
  expect_error([&] { remove_leftovers(Location(storage)); }, ErrorCode::kCorrupt, ".metadata");
  EXPECT_EQ(memory_image(*storage), image);
}

TEST(Gc, AFileThatCantBeRemovedIsNamedOnceTheOthersAreGone) {
  FileImage image = with_dead_files(saved());
  const std::string note = engine::note_name(kDead);
  image[note] = {};
  image.erase(engine::temporary_name(kDead, "metadata"));
  const auto inner = memory_storage(image);
  const std::string stuck = std::string(kDead) + "__0_0.distcp";
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    const bool hit = call.op == StorageOp::kRemove && call.name == stuck;
    return hit ? FaultAction::fail(EACCES) : FaultAction::pass();
  });
  try {
    remove_leftovers(Location(disk->storage()));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_EQ(error.sys_errno(), EACCES);
    EXPECT_EQ(error.file(), stuck);
  }
  EXPECT_THAT(names_of(find_leftovers(Location(inner))), ElementsAre(note, stuck));
}

// The one file that makes it a checkpoint was removed by hand.
TEST(Gc, ACheckpointThatHasOnlyLostItsMetadataIsNoLeftoverUnlessForced) {
  FileImage image = saved();
  image.erase(".metadata");
  const auto storage = memory_storage(image);
  for (const auto call : {&find_leftovers, &remove_leftovers}) {
    expect_error([&] { call(Location(storage), false); }, ErrorCode::kCorrupt,
                 "has lost only its .metadata: its manifest and all its data files are in memory");
  }
  expect_error([&] { find_leftovers(Location(storage)); }, ErrorCode::kCorrupt, "cp -a FROM/. TO");
  expect_error([&] { Checkpoint::open(Location(storage)); }, ErrorCode::kNotFound,
               "has lost only its .metadata");
  EXPECT_EQ(memory_image(*storage), image);
  EXPECT_EQ(find_leftovers(Location(storage), true).size(), 3u);
  EXPECT_EQ(memory_image(*storage), image);
  EXPECT_EQ(remove_leftovers(Location(storage), true).size(), 3u);
  EXPECT_THAT(storage->list(), IsEmpty());
}

// Killed between the sync of its metadata and the rename that makes it a checkpoint.
TEST(Gc, ASaveThatWasKilledBeforeItsMetadataHadItsNameIsALeftover) {
  FileImage image = saved();
  auto metadata = image.extract(".metadata");
  metadata.key() = engine::temporary_name(save_id_in(image), "metadata");
  image.insert(std::move(metadata));
  const auto storage = memory_storage(image);
  EXPECT_EQ(find_leftovers(Location(storage)).size(), 4u);
  EXPECT_EQ(memory_image(*storage), image);
  EXPECT_EQ(remove_leftovers(Location(storage)).size(), 4u);
  EXPECT_THAT(storage->list(), IsEmpty());
}

TEST(Gc, DataFilesWithoutTheHiddenFilesAreNoLeftoversUnlessForced) {
  const FileImage image = without_hidden_files(saved());
  const auto storage = memory_storage(image);
  expect_error([&] { remove_leftovers(Location(storage)); }, ErrorCode::kCorrupt,
               "without the hidden files (.metadata, .tilestone) of their checkpoint");
  EXPECT_EQ(memory_image(*storage), image);
  EXPECT_EQ(remove_leftovers(Location(storage), true).size(), 2u);
}

TEST(Gc, FilesOfAFailedSaveAreLeftoversThoughItsManifestExists) {
  const auto failed = [] {
    FileImage image = saved();
    image.erase(".metadata");
    image[engine::note_name(save_id_in(image))] = {};
    return image;
  };
  for (const char* lost : {"__1_0.distcp", "__0_0.distcp"}) {
    FileImage image = failed();
    std::erase_if(image, [&](const auto& file) { return file.first.ends_with(lost); });
    EXPECT_EQ(find_leftovers(Location(memory_storage(image))).size(), 3u);
  }
  FileImage image = failed();
  for (auto& [name, bytes] : image) {
    if (name.ends_with(".distcp")) bytes.pop_back();
  }
  EXPECT_EQ(find_leftovers(Location(memory_storage(image))).size(), 4u);
}

// A disk over `inner` on which the operation fails until `*fails` is false.
std::shared_ptr<FaultDisk> failing_at(const std::shared_ptr<Storage>& inner, StorageOp op,
                                      const std::string& part, const bool* fails) {
  return FaultDisk::create(inner, [=](const StorageCall& call) {
    const std::string_view name = op == StorageOp::kRename ? call.to : call.name;
    const bool hit = *fails && call.op == op && name.find(part) != name.npos;
    return hit ? FaultAction::fail(EIO) : FaultAction::pass();
  });
}

TEST(Gc, NoSaveRemovesCopiedDataFilesThoughOneHasFailedAmongThem) {
  const FileImage copied = without_hidden_files(saved());
  for (const StorageOp op : {StorageOp::kSync, StorageOp::kRename, StorageOp::kSettle}) {
    const auto inner = memory_storage(copied);
    bool fails = true;
    const std::string part = op == StorageOp::kSync     ? ".distcp"
                             : op == StorageOp::kRename ? ".metadata"
                                                        : ".tilestone";
    const auto disk = failing_at(inner, op, part, &fails);
    SaveOptions options;
    options.overwrite = true;
    const auto save_once = [&] { save(row_state(solo(), 9), Location(disk->storage()), options); };
    expect_error(save_once, ErrorCode::kIo, "injected");
    expect_files(inner, copied);
    expect_error([&] { remove_leftovers(Location(inner)); }, ErrorCode::kCorrupt, "hidden files");
    fails = false;
    for (int i = 0; i < 3; ++i) save_once();
    expect_rows(Location(inner), 9, 1);
    expect_files(inner, copied);
    EXPECT_THAT(remove_leftovers(Location(inner)), IsEmpty());
    expect_files(inner, copied);
    EXPECT_EQ(remove_leftovers(Location(inner), true).size(), copied.size());
    expect_rows(Location(inner), 9, 1);
  }
}

TEST(Gc, OpeningACopyWithoutItsHiddenFilesSaysSo) {
  const auto storage = memory_storage(without_hidden_files(saved()));
  const Error error = error_of([&] { Checkpoint::open(Location(storage)); });
  EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  EXPECT_THAT(error.what(), Mentions("(.metadata, .tilestone)", "cp -a FROM/. TO"));
  StateDict state = row_state(solo(), 0);
  expect_error([&] { load(state, Location(storage)); }, ErrorCode::kNotFound, "cp -a FROM/. TO");
}

// Nothing shows that its save failed, and its data files can still be read.
TEST(Gc, ASaveKeepsWhatHasOnlyLostItsMetadata) {
  FileImage image = saved();
  image.erase(".metadata");
  const auto storage = memory_storage(image);
  SaveOptions options;
  options.overwrite = true;
  for (int i = 0; i < 2; ++i) save(row_state(solo(), 9), Location(storage), options);
  expect_rows(Location(storage), 9, 1);
  expect_files(storage, image);
}

// The new checkpoint might not become durable.
TEST(Gc, APossiblyWholeCheckpointIsRemovedOnlyOnceTheNewOneExists) {
  FileImage image = saved();
  image.erase(".metadata");
  image[engine::note_name(save_id_in(image))] = {};
  const auto inner = memory_storage(image);
  bool fails = true;
  const auto disk = failing_at(inner, StorageOp::kRename, ".metadata", &fails);
  const auto save_once = [&] { save(row_state(solo(), 9), Location(disk->storage())); };
  expect_error(save_once, ErrorCode::kIo, "injected");
  expect_files(inner, image);
  fails = false;
  save_once();
  expect_rows(Location(inner), 9, 1);
  EXPECT_EQ(inner->list().size(), 4u);  // metadata, lock, manifest, data
}

TEST(Gc, AReplacedCheckpointOfWhichAFileStaysIsRemovedByTheNextSave) {
  const FileImage image = saved();
  const std::string stuck = save_id_in(image) + "__1_0.distcp";
  const auto inner = memory_storage(image);
  bool fails = true;
  const auto disk = failing_at(inner, StorageOp::kRemove, stuck, &fails);
  SaveOptions options;
  options.overwrite = true;
  save(row_state(solo(), 8), Location(disk->storage()), options);
  EXPECT_TRUE(inner->stat(stuck));
  fails = false;
  EXPECT_EQ(find_leftovers(Location(inner)).size(), 2u);  // and the note
  save(row_state(solo(), 9), Location(disk->storage()), options);
  EXPECT_EQ(inner->list().size(), 4u);
  expect_rows(Location(inner), 9, 1);
}

TEST(Gc, TheFilesOfAReplacedCheckpointThatCouldNotBeReadGo) {
  FileImage image = saved();
  image[".metadata"].resize(40);
  const auto storage = memory_storage(image);
  SaveOptions options;
  options.overwrite = true;
  save(row_state(solo(), 9), Location(storage), options);
  EXPECT_EQ(storage->list().size(), 4u);
  expect_rows(Location(storage), 9, 1);
}

TEST(Gc, LookingChangesNothingAndTakesNoLock) {
  const auto inner = memory_storage(with_dead_files(saved()));
  const auto disk = FaultDisk::create(inner, [](const StorageCall& call) {
    EXPECT_FALSE(changes_storage(call.op)) << to_string(call.op) << " " << call.name;
    return FaultAction::pass();
  });
  EXPECT_EQ(find_leftovers(Location(disk->storage())).size(), dead_names().size());
}

TEST(Gc, SavesBesideAnEndlessLookNeverFail) {
  const TempDirectory folder;
  std::atomic<bool> over = false;
  std::thread looking([&] {
    while (!over) {
      try {
        find_leftovers(Location(folder.path()));
      } catch (const Error& error) {
        const bool expected =
            error.code() == ErrorCode::kNotFound || error.code() == ErrorCode::kAlreadyExists;
        EXPECT_TRUE(expected) << error.what();
      }
    }
  });
  SaveOptions options;
  options.overwrite = true;
  for (int i = 0; i < 40; ++i) {
    EXPECT_NO_THROW(save(row_state(solo(), i), Location(folder.path()), options));
  }
  over = true;
  looking.join();
}

TEST(Gc, ADirectoryThatCanOnlyBeReadIsLookedAt) {
  const SmallMount mount;
  if (!mount) return;  // looking creates nothing: tested above without a mount
  const auto storage = posix_storage(mount.path());
  storage->directories()->make(".tilestone");
  for (const auto& [name, bytes] : with_dead_files(saved())) put_file(*storage, name, bytes);
  ASSERT_TRUE(mount.make_read_only());
  EXPECT_EQ(find_leftovers(Location(mount.path())).size(), dead_names().size());
  expect_error([&] { remove_leftovers(Location(mount.path())); }, ErrorCode::kIo, "Read-only");
}

TEST(Gc, AnEmptyOrMissingPlaceIsNotFound) {
  const TempDirectory folder;
  expect_error([&] { find_leftovers(Location(folder.path())); }, ErrorCode::kNotFound, "no file");
  expect_error([&] { remove_leftovers(Location(folder.path() + "/typo")); }, ErrorCode::kNotFound,
               "no file");
}

TEST(Gc, NamesLikeOursThatAreNoFilesStay) {
  const TempDirectory folder;
  const std::string fifo = folder.path() + "/" + kDead + "__0_0.distcp";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THAT(remove_leftovers(Location(folder.path())), IsEmpty());
  EXPECT_EQ(::access(fifo.c_str(), F_OK), 0);
}

// If nothing can be locked, an apparent leftover may be a file of a save in progress.
TEST(Gc, LeavesLeftoversAloneWhereNothingCanBeLocked) {
  const auto memory = memory_storage(with_dead_files(saved()));
  const auto disk = FaultDisk::create(memory, [](const StorageCall& call) {
    return call.op == StorageOp::kLock ? FaultAction::fail(ENOTSUP) : FaultAction::pass();
  });
  const Location location(disk->storage());
  SaveOptions options;
  options.overwrite = true;
  save(row_state(solo(), 5), location, options);
  expect_rows(location, 5, 1);
  expect_error([&] { remove_leftovers(location); }, ErrorCode::kUnsupported, "lock");
  for (const std::string& name : memory->list(".tilestone/")) {
    EXPECT_FALSE(name.ends_with(".begun"))
        << name;  // its own note, which no other save can recognize
  }
  const size_t dead = dead_files().size();
  for (const auto& [name, bytes] : dead_files()) EXPECT_TRUE(memory->stat(name)) << name;
  EXPECT_GE(find_leftovers(location).size(), dead);
  save(row_state(solo(), 6), Location(memory), options);  // with locks a save removes them
  for (const auto& [name, bytes] : dead_files()) EXPECT_FALSE(memory->stat(name)) << name;
}

}  // namespace tilestone::gc_test
