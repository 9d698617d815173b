// Saves that write to a directory beside their location, which then replaces the location as a
// whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <thread>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/session.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::sibling_save_test {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

constexpr char kDeadId[] = "01234567-89ab-4cde-8f01-23456789abcd";

SaveOptions options_of(const std::shared_ptr<const Dialect>& dialect, bool overwrite = false) {
  SaveOptions options;
  options.dialect = dialect;
  options.overwrite = overwrite;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  return options;
}

void save_one(const Location& location, int64_t first,
              const std::shared_ptr<const Dialect>& dialect, bool overwrite = false) {
  save(row_state(solo(), first), location, options_of(dialect, overwrite));
}

// The "step" of common.pt, which is beside metadata.json; 0: neither file exists.
int64_t step_of_common(Storage& storage) {
  EXPECT_EQ(storage.stat("common.pt").has_value(), storage.stat("metadata.json").has_value());
  if (!storage.stat("common.pt")) return 0;
  const Bytes bytes = read_file(storage, "common.pt", 1u << 20);
  return read_torch_archive(bytes).find("step")->as_int();
}

// Expects that the location holds files of one save only, and that nothing is beside it.
void expect_only(Storage& parent, const std::string& name, int64_t first, bool fixed_names,
                 int rows = 1) {
  const auto storage = parent.child(name);
  expect_rows(Location(storage), first, rows);
  EXPECT_EQ(step_of_common(*storage), fixed_names ? first : 0);
  std::vector<std::string> names;
  for (const std::string& file : storage->list()) {
    if (!file.starts_with(".tilestone/")) names.push_back(file);
  }
  EXPECT_EQ(names.size(), 1u + static_cast<size_t>(rows) + (fixed_names ? 2 : 0));
  EXPECT_THAT(parent.list(), Each(StartsWith(name + "/")));
}

TEST(StagedSave, ANewDirectoryAppearsWithAllFilesAndNothingBesideIt) {
  const auto parent = memory_storage();
  save_one(parent->child("a/ckpt"), 5, megatron_dialect());
  expect_only(*parent->child("a"), "ckpt", 5, true);
  const TempDirectory folder;
  ASSERT_EQ(::mkdir((folder.path() + "/empty").c_str(), 0700), 0);
  for (const char* name : {"empty", "absent", "deep/absent"}) {
    save_one(folder.path() + "/" + name, 6, megatron_dialect());
    expect_rows(folder.path() + "/" + name, 6, 1);
  }
  expect_only(*posix_storage(folder.path() + "/deep"), "absent", 6, true);
}

TEST(StagedSave, AnExistingCheckpointIsReplacedAsAWholeByEitherKindOfSave) {
  for (const bool old_fixed : {false, true}) {
    for (const bool new_fixed : {false, true}) {
      const TempDirectory folder;
      for (const auto& parent : {memory_storage(), posix_storage(folder.path())}) {
        const auto location = parent->child("ckpt");
        save_one(location, 1, old_fixed ? megatron_dialect() : pytorch_dialect());
        run_ranks(2, [&](Communicator comm) {
          SaveOptions options =
              options_of(new_fixed ? megatron_dialect() : pytorch_dialect(), true);
          options.comm = comm;
          save(row_state(comm, 100), location, options);
        });
        expect_only(*parent, "ckpt", 100, new_fixed, 2);
      }
    }
  }
}

TEST(StagedSave, TheDirectoryKeepsItsPermissions) {
  const TempDirectory folder;
  const std::string path = folder.path() + "/a";
  const auto mode = [&] {
    struct stat info;
    return ::stat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
  };
  ASSERT_EQ(::mkdir(path.c_str(), 0755), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0700), 0);
  save_one(path, 10, megatron_dialect());
  EXPECT_EQ(mode(), 0700u);
  ASSERT_EQ(::chmod(path.c_str(), 02770), 0);
  save_one(path, 20, megatron_dialect(), true);
  EXPECT_EQ(mode(), 02770u);
  // What is read-only can still be replaced, and then changed by its owner.
  ASSERT_EQ(::chmod(path.c_str(), 0550), 0);
  save_one(path, 30, megatron_dialect(), true);
  EXPECT_EQ(mode(), 0750u);
}

TEST(StagedSave, ALinkToTheDirectoryStaysALink) {
  const TempDirectory folder;
  save_one(folder.path() + "/real", 1, megatron_dialect());
  const std::string link = folder.path() + "/link";
  ASSERT_EQ(::symlink("real", link.c_str()), 0);
  save_one(link, 2, megatron_dialect(), true);
  struct stat info;
  ASSERT_EQ(::lstat(link.c_str(), &info), 0);
  EXPECT_TRUE(S_ISLNK(info.st_mode));
  expect_rows(folder.path() + "/real", 2, 1);
}

TEST(StagedSave, WithoutOverwriteNothingThatExistsIsReplaced) {
  const auto parent = memory_storage();
  save_one(parent->child("ckpt"), 1, megatron_dialect());
  const FileImage before = memory_image(*parent);
  for (const auto& dialect : {megatron_dialect(), pytorch_dialect()}) {
    expect_error([&] { save_one(parent->child("ckpt"), 2, dialect); }, ErrorCode::kAlreadyExists,
                 "overwrite");
  }
  EXPECT_EQ(memory_image(*parent), before);
}

TEST(StagedSave, AFileThatBelongsToNoCheckpointIsNamedAndNothingIsReplaced) {
  for (const int round : {0, 1, 2, 3}) {
    const bool stands = round % 2 == 1;
    const std::string folder = round < 2 ? "sub" : ".tilestone";
    const auto parent = memory_storage();
    if (stands) save_one(parent->child("ckpt"), 1, megatron_dialect());
    put_file(*parent, "beside", {});
    parent->directories()->make("ckpt/" + folder);
    put_file(*parent, "ckpt/" + folder + "/notes.txt", as_bytes("mine"));
    const FileImage before = memory_image(*parent);
    expect_error([&] { save_one(parent->child("ckpt"), 2, megatron_dialect(), true); },
                 ErrorCode::kUnsupported, folder + "/notes.txt");
    EXPECT_EQ(memory_image(*parent), before);  // no lock file either
    EXPECT_THAT(parent->list_directories(), ElementsAre("ckpt"));
    if (stands) expect_rows(parent->child("ckpt"), 1, 1);
  }
}

TEST(StagedSave, WhatStockMegatronLeftOfASaveThatDidNotEndIsReplacedWhereThatIsAsked) {
  const auto parent = memory_storage();
  parent->directories()->make("ckpt/sub");
  put_file(*parent, "ckpt/common.pt", as_bytes("PK half an archive"));
  put_file(*parent, "ckpt/__0_0.distcp", as_bytes("half a tensor"));
  put_file(*parent, "ckpt/mlp__12_1.distcp", as_bytes("half a tensor"));
  const auto refuse = [&](const std::string& file, bool overwrite,
                          const std::shared_ptr<const Dialect>& dialect,
                          const std::string& format) {
    FileImage before = memory_image(*parent);
    before.erase("ckpt/.tilestone/lock");
    SaveOptions options = options_of(dialect, overwrite);
    options.format = format_named(format);
    expect_error([&] { save(row_state(solo(), 2), Location(parent->child("ckpt")), options); },
                 ErrorCode::kUnsupported, file);
    FileImage after = memory_image(*parent);
    after.erase("ckpt/.tilestone/lock");
    EXPECT_EQ(after, before);
  };
  refuse("__0_0.distcp", false, megatron_dialect(), "torch_dist");
  refuse("__0_0.distcp", true, pytorch_dialect(), "zarr");
  for (const std::string own :
       {"notes.txt", "a__0_0.distcp.old", "__0_x.distcp", "metadata.json", "sub/__0_0.distcp"}) {
    put_file(*parent, "ckpt/" + own, as_bytes(R"({"sharded_backend": "torch_dist"})"));
    const bool finished = own == "metadata.json";
    refuse(finished ? "__0_0.distcp" : own, true, megatron_dialect(), "torch_dist");
    parent->remove("ckpt/" + own);
  }
  parent->remove("ckpt/common.pt");
  put_file(*parent, "ckpt/common.pt", as_bytes("a user's own"));
  refuse("common.pt", true, megatron_dialect(), "torch_dist");
  parent->remove("ckpt/common.pt");
  put_file(*parent, "ckpt/common.pt", as_bytes("PK half an archive"));
  save_one(parent->child("ckpt"), 2, megatron_dialect(), true);
  expect_rows(parent->child("ckpt"), 2, 1);
  EXPECT_FALSE(parent->stat("ckpt/__0_0.distcp"));
}

// A user's own file with a name that Megatron-Core uses is not part of a checkpoint.
TEST(StagedSave, AUsersOwnFileOfAKnownNameIsNamedAndNothingIsReplaced) {
  const std::vector<std::string> both = {"common.pt", "metadata.json"};
  for (const auto& names : std::vector<std::vector<std::string>>{{both[0]}, {both[1]}, both}) {
    const auto parent = memory_storage();
    save_one(parent->child("ckpt"), 1, pytorch_dialect());
    for (const std::string& name : names) {
      put_file(*parent, "ckpt/" + name, as_bytes(R"({"mine": 1})"));
    }
    expect_rows(parent->child("ckpt"), 1, 1);
    const FileImage image = memory_image(*parent);
    expect_error([&] { save_one(parent->child("ckpt"), 2, megatron_dialect(), true); },
                 ErrorCode::kUnsupported, names[0]);
    EXPECT_EQ(memory_image(*parent), image);
  }
}

TEST(StagedSave, ACheckpointThatCantBeReadIsNotReplacedAsAWhole) {
  const auto parent = memory_storage();
  save_one(parent->child("ckpt"), 1, megatron_dialect());
  FileImage image = memory_image(*parent);
  image["ckpt/.metadata"].resize(40);
  const auto damaged = memory_storage(image);
  expect_error([&] { save_one(damaged->child("ckpt"), 2, megatron_dialect(), true); },
               ErrorCode::kUnsupported, "it is not known which files belong to it");
  EXPECT_EQ(memory_image(*damaged), image);
}

TEST(StagedSave, APlaceWithoutAParentIsNotReplaced) {
  const auto root = memory_storage();
  save_one(root, 1, megatron_dialect());  // nothing is there: the switch comes last
  const FileImage before = memory_image(*root);
  expect_error([&] { save_one(root, 2, megatron_dialect(), true); }, ErrorCode::kUnsupported,
               "no directory can be made beside memory");
  EXPECT_EQ(memory_image(*root), before);
}

TEST(StagedSave, ANameThatIsTooLongForTheDirectoryBesideItIsRefused) {
  const TempDirectory folder;
  const std::string fits = folder.path() + "/" + std::string(255 - 48, 'n');
  save_one(fits, 1, megatron_dialect());
  expect_rows(fits, 1, 1);
  expect_error([&] { save_one(fits + "n", 1, megatron_dialect()); }, ErrorCode::kIo,
               "48 bytes longer");
  EXPECT_FALSE(std::filesystem::exists(fits + "n"));
}

TEST(StagedSave, TheWorkingDirectoryIsRefused) {
  const TempDirectory folder;
  const std::string path = folder.path() + "/ckpt", before = std::filesystem::current_path();
  save_one(path, 1, megatron_dialect());
  std::filesystem::current_path(path);
  expect_error([&] { save_one(".", 2, megatron_dialect(), true); }, ErrorCode::kUnsupported,
               "the working directory of this process");
  std::filesystem::current_path(before);
  expect_only(*posix_storage(folder.path()), "ckpt", 1, true);
}

// The kernel neither renames a directory to a mount point nor exchanges it for one.
TEST(StagedSave, AMountPointIsRefusedAndLeftAsItWas) {
  const SmallMount mount;
  if (!mount) return;
  const std::string path = mount.path();
  const auto entry = posix_storage(path)->parent();
  ASSERT_TRUE(entry);
  const auto device = [](const std::string& of) {
    struct stat info = {};
    EXPECT_EQ(::stat(of.c_str(), &info), 0);
    return info.st_dev;
  };
  const auto files = [&] {
    FileImage image;
    for (const std::string& name : posix_storage(path)->list()) {
      if (name != ".tilestone/lock") image[name] = read_file(*posix_storage(path), name, 1u << 20);
    }
    return image;
  };
  const auto expect_refused = [&](const std::string& step, const std::string& name) {
    const FileImage before = files();
    try {
      save_one(path, 2, megatron_dialect(), true);
      ADD_FAILURE() << "the save has replaced a mount point";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
      EXPECT_EQ(error.sys_errno(), EBUSY) << error.what();
      EXPECT_THAT(error.message(), AllOf(StartsWith(step), HasSubstr("\"" + entry->name + "\""),
                                         HasSubstr("the file system does not support it")));
      EXPECT_THAT(error.file(), HasSubstr(name));
      EXPECT_THAT(error.hint(), HasSubstr("save to a directory that does not exist yet"));
    }
    EXPECT_EQ(files(), before);
    EXPECT_NE(device(path), device(entry->storage->describe())) << "it is still a mount point";
    EXPECT_THAT(entry->storage->list_directories("." + entry->name), IsEmpty());
  };
  expect_refused("cannot rename the directory", "." + entry->name + ".tilestone-");
  save_one(path, 1, pytorch_dialect());
  expect_refused("cannot exchange the directories", entry->name);
  expect_rows(path, 1, 1);
}

TEST(StagedSave, WhileOneIsUnderWayNobodyElseSavesOrCleansThere) {
  for (const bool stands : {false, true}) {
    const TempDirectory folder;
    const std::string path = folder.path() + "/ckpt";
    if (stands) save_one(path, 1, megatron_dialect());
    int refused = 0;
    SaveOptions options = options_of(megatron_dialect(), true);
    options.progress = [&](const Progress&) {
      for (const auto& dialect : {megatron_dialect(), pytorch_dialect()}) {
        expect_error([&] { save_one(path, 3, dialect, true); }, ErrorCode::kAlreadyExists,
                     "is under way at " + path + ", by process " + std::to_string(::getpid()));
      }
      for (const auto call : {&find_leftovers, &remove_leftovers}) {
        expect_error([&] { call(path, true); }, ErrorCode::kAlreadyExists, "is under way");
      }
      ++refused;
    };
    save(row_state(solo(), 2), path, options);
    EXPECT_GT(refused, 0);
    expect_only(*posix_storage(folder.path()), "ckpt", 2, true);
  }
}

// Adds what a killed save in a sibling has left to a checkpoint whose file names do not contain the
// save id.
FileImage with_dead_siblings(FileImage image) {
  for (const char* name : {".ckpt.tilestone-", ".other.tilestone-", "ckpt.tilestone-"}) {
    image[name + std::string(kDeadId) + "/common.pt"] = pattern_bytes(70);
    image[name + std::string(kDeadId) + "/sub/0.0"] = pattern_bytes(30);
  }
  image[".ckpt.tilestone-notes/mine"] = {};
  return image;
}

const std::string kDeadSibling = std::string(".ckpt.tilestone-") + kDeadId;

void put_dead_sibling(Storage& parent) {
  parent.directories()->make(kDeadSibling);
  put_file(parent, kDeadSibling + "/common.pt", pattern_bytes(70));
}

TEST(StagedSave, TheNextSaveRemovesWhatDeadOnesHaveLeftAndNothingElse) {
  for (const auto& dialect : {megatron_dialect(), pytorch_dialect()}) {
    FileImage image = with_dead_siblings({});
    const auto parent = memory_storage(image);
    save_one(parent->child("ckpt"), 1, dialect);
    std::erase_if(image, [](const auto& file) { return file.first.starts_with(kDeadSibling); });
    FileImage left = memory_image(*parent);
    std::erase_if(left, [](const auto& file) { return file.first.starts_with("ckpt/"); });
    EXPECT_EQ(left, image);
    expect_rows(parent->child("ckpt"), 1, 1);
  }
}

TEST(StagedSave, GcListsAndRemovesWhatDeadOnesHaveLeft) {
  for (const bool stands : {false, true}) {
    const auto parent = memory_storage(with_dead_siblings({}));
    const Location location(parent->child("ckpt"));
    if (stands) {
      const auto made = memory_storage();
      save_one(made->child("ckpt"), 1, megatron_dialect());
      for (const auto& [name, bytes] : memory_image(*made)) {
        parent->directories()->make("ckpt/.tilestone");
        put_file(*parent, name, bytes);
      }
    }
    const auto before = memory_image(*parent);
    const auto found = find_leftovers(location);
    EXPECT_EQ(memory_image(*parent), before);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].name, "../" + kDeadSibling);
    EXPECT_EQ(found[0].size, 100u);
    EXPECT_THAT(found[0].what, AllOf(HasSubstr("directory"), HasSubstr(kDeadId)));
    EXPECT_THAT(found[0].why, HasSubstr("not published"));
    EXPECT_EQ(remove_leftovers(location).size(), 1u);
    EXPECT_THAT(parent->list_directories(), Not(Contains(kDeadSibling)));
    EXPECT_THAT(parent->list(), Contains(".ckpt.tilestone-notes/mine"));
    if (stands) expect_rows(location, 1, 1);
  }
}

TEST(StagedSave, GcSaysOfAReplacedCheckpointWhichSaveHasReplacedIt) {
  const auto parent = memory_storage();
  save_one(parent->child("ckpt"), 1, megatron_dialect());
  const auto disk = FaultDisk::create(parent, [](const StorageCall& call) {
    const bool swap = call.op == StorageOp::kExchangeDirectories;
    return swap ? FaultAction::die_after() : FaultAction::pass();
  });
  EXPECT_ANY_THROW(save_one(disk->storage()->child("ckpt"), 2, megatron_dialect(), true));
  expect_rows(parent->child("ckpt"), 2, 1);
  const auto found = find_leftovers(Location(parent->child("ckpt")));
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0].why, HasSubstr("has replaced"));
  remove_leftovers(Location(parent->child("ckpt")));
  expect_only(*parent, "ckpt", 2, true);
}

TEST(StagedSave, ARankThatFailsLeavesNoDirectoryAndKeepsWhatStood) {
  const auto parent = memory_storage();
  save_one(parent->child("ckpt"), 1, megatron_dialect());
  for (const StorageOp op : {StorageOp::kCreate, StorageOp::kSync, StorageOp::kSettle}) {
    for (const int rank : {0, 1}) {
      const auto disk = FaultDisk::create(parent, [&](const StorageCall& call) {
        const bool hit = call.op == op && call.client == rank && call.name.starts_with(".ckpt.");
        return hit ? FaultAction::fail(EIO) : FaultAction::pass();
      });
      const auto texts = failures(2, [&](Communicator comm) {
        SaveOptions options = options_of(megatron_dialect(), true);
        options.comm = comm;
        save(row_state(comm, 2), disk->storage(comm.rank())->child("ckpt"), options);
      });
      EXPECT_THAT(texts, Each(HasSubstr("injected"))) << to_string(op) << " " << rank;
      expect_only(*parent, "ckpt", 1, true);
      EXPECT_THAT(parent->list_directories(), ElementsAre("ckpt"));
    }
  }
}

// On FUSE (and NFS), a file that is removed while it is open stays in its directory until it is
// closed. So the directory of a lock can't be removed under the lock.
TEST(StagedSave, ADirectoryThatCantBeRemovedUnderItsLockIsRemovedAfterwards) {
  const TempDirectory folder;
  const auto parent = posix_storage(folder.path());
  int not_empty = 0;  // that many removals of directories fail
  bool fails = false;
  const auto disk = FaultDisk::create(parent, [&](const StorageCall& call) {
    if (call.op == StorageOp::kRemoveDirectory && not_empty > 0) {
      --not_empty;
      return FaultAction::fail(ENOTEMPTY);
    }
    return fails && call.op == StorageOp::kSync ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  const auto location = disk->storage()->child("ckpt");
  const auto expect_alone = [&](const char* what) {
    EXPECT_EQ(not_empty, 0) << what;
    EXPECT_THAT(parent->list_directories(), ElementsAre("ckpt")) << what;
  };
  save_one(location, 1, megatron_dialect());
  fails = true;
  not_empty = 3;
  EXPECT_ANY_THROW(save_one(location, 2, megatron_dialect(), true));
  expect_alone("a failed save");
  fails = false;
  not_empty = 3;
  save_one(location, 3, megatron_dialect(), true);
  expect_alone("the replaced checkpoint");
  put_dead_sibling(*parent);
  not_empty = 3;
  save_one(location, 4, megatron_dialect(), true);
  expect_alone("a dead save, found by a save");
  put_dead_sibling(*parent);
  not_empty = 3;
  EXPECT_EQ(remove_leftovers(Location(location)).size(), 1u);
  expect_alone("a dead save, found by gc");
  expect_only(*parent, "ckpt", 4, true);
}

TEST(StagedSave, AFailedOneLeavesNoLockInACheckpointOfAnotherWriter) {
  const TempDirectory folder;
  const auto parent = posix_storage(folder.path());
  bool fails = false;
  const auto disk = FaultDisk::create(parent, [&](const StorageCall& call) {
    return fails && call.op == StorageOp::kSync ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  const auto place = disk->storage()->child("ckpt");
  save_one(place, 1, megatron_dialect());
  std::filesystem::remove_all(folder.path() + "/ckpt/.tilestone");
  const std::vector<std::string> before = parent->list();
  fails = true;
  EXPECT_ANY_THROW(save_one(place, 2, megatron_dialect(), true));
  EXPECT_EQ(parent->list(), before);
  EXPECT_THAT(parent->list_directories("ckpt/"), IsEmpty());
  EXPECT_THAT(parent->list_directories(), ElementsAre("ckpt"));
  const auto deeper = disk->storage()->child("run/a/ckpt");
  EXPECT_ANY_THROW(save_one(deeper, 2, megatron_dialect()));
  EXPECT_THAT(parent->list_directories(), ElementsAre("ckpt"));
  fails = false;
  save_one(place, 3, megatron_dialect(), true);
  save_one(deeper, 3, megatron_dialect());
}

TEST(StagedSave, AKilledRankEndsTheSaveAndKeepsWhatStood) {
  const LogLevel before = set_log_level(LogLevel::kOff);
  for (const int rank : {0, 1}) {
    const auto parent = memory_storage();
    save_one(parent->child("ckpt"), 1, megatron_dialect());
    const auto disk = FaultDisk::create(parent, [&](const StorageCall& call) {
      const bool hit = call.op == StorageOp::kSync && call.client == rank;
      return hit ? FaultAction::die() : FaultAction::pass();
    });
    const auto texts = failures(2, [&](Communicator comm) {
      SaveOptions options = options_of(megatron_dialect(), true);
      options.comm = comm;
      save(row_state(comm, 2), disk->storage(comm.rank())->child("ckpt"), options);
    });
    EXPECT_THAT(texts, Each(Not(IsEmpty())));
    expect_rows(parent->child("ckpt"), 1, 1);
    save_one(parent->child("ckpt"), 3, megatron_dialect(), true);
    expect_only(*parent, "ckpt", 3, true);
  }
  set_log_level(before);
}

TEST(StagedSave, ARankThatSeesAnotherDirectoryIsNamed) {
  const auto one = memory_storage(), other = memory_storage();
  const auto texts = failures(2, [&](Communicator comm) {
    SaveOptions options = options_of(megatron_dialect());
    options.comm = comm;
    save(row_state(comm, 2), (comm.rank() == 0 ? one : other)->child("ckpt"), options);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("(rank 1)"), HasSubstr("sees another directory"))));
  EXPECT_THAT(one->list(), IsEmpty());
  EXPECT_THAT(one->list_directories(), IsEmpty());
  EXPECT_THAT(other->list_directories(), IsEmpty());
}

// Saves of both kinds, readers and cleanups at the same time, on a real file system: each reader
// gets one save or a clear error, and at the end there is a complete checkpoint.
TEST(StagedSave, SavesReadersAndCleaningsAtOnceNeverMix) {
  const LogLevel before = set_log_level(LogLevel::kOff);
  const TempDirectory folder;
  const std::string path = folder.path() + "/ckpt";
  save_one(path, 1, megatron_dialect());
  std::atomic<int> saved = 0, read = 0;
  std::atomic<bool> over = false;
  const auto allowed = [](const Error& error) {
    return error.code() == ErrorCode::kAlreadyExists || error.code() == ErrorCode::kNotFound;
  };
  const auto saving = [&](int64_t first, const std::shared_ptr<const Dialect>& dialect) {
    SaveOptions options = options_of(dialect, true);
    // Saves follow each other so fast that a reader may never see a complete one. So after 60
    // saves, there are pauses between them until a reader has read one.
    for (int64_t i = 0; i < 60 || (read == 0 && i < 2000); ++i) {
      if (i >= 60) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      options.format = format_named(i % 2 == 0 ? "torch_dist" : "zarr");
      try {
        save(row_state(solo(), first + i), path, options);
        ++saved;
      } catch (const Error& error) {
        EXPECT_TRUE(allowed(error)) << error.what();
      }
    }
  };
  const auto reading = [&] {
    while (!over) {
      try {
        const Checkpoint checkpoint = Checkpoint::open(path);
        const int64_t first = step_of(checkpoint).as_int();
        EXPECT_EQ(elements(checkpoint.read("w")),
                  elements(counting(DType::kFloat32, {1, 8}, first)));
        EXPECT_EQ(elements(checkpoint.read("p")), elements(counting(DType::kInt64, {3}, first)));
        ++read;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
      }
    }
  };
  const auto cleaning = [&] {
    while (!over) {
      try {
        remove_leftovers(path);
      } catch (const Error& error) {
        EXPECT_TRUE(allowed(error)) << error.what();
      }
    }
  };
  std::vector<std::thread> others;
  others.emplace_back(reading);
  others.emplace_back(cleaning);
  std::vector<std::thread> savers;
  savers.emplace_back(saving, 1000, megatron_dialect());
  savers.emplace_back(saving, 2000, megatron_dialect());
  savers.emplace_back(saving, 3000, pytorch_dialect());
  for (std::thread& thread : savers) thread.join();
  over = true;
  for (std::thread& thread : others) thread.join();
  EXPECT_GT(saved, 0);
  EXPECT_GT(read, 0);
  save_one(path, 9, megatron_dialect(), true);
  expect_only(*posix_storage(folder.path()), "ckpt", 9, true);
  EXPECT_THAT(posix_storage(folder.path())->list_directories(), ElementsAre("ckpt"));
  set_log_level(before);
}

}  // namespace tilestone::sibling_save_test
