// Each storage call of a save and of a load fails, with an injected error or on a real file system.
// Every rank ends with the same error, which has the original errno and the file's name; the old or
// the new checkpoint is there; and a later save works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::failing_storage_test {

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int64_t kOld = 100, kNew = 500, kLater = 900;

class FailingStorage : public testing::Test {
 protected:
  FailingStorage() { set_log_level(LogLevel::kOff); }  // failures are also logged
  ~FailingStorage() override { set_log_level(before_); }

 private:
  const LogLevel before_ = set_log_level(LogLevel::kOff);
};

using Errors = std::vector<std::optional<Error>>;  // by rank

Errors collect(const std::function<void(Communicator)>& body) {
  Errors errors;
  for (const std::exception_ptr& thrown : run_ranks_collect(kRanks, body)) {
    errors.emplace_back();
    if (!thrown) continue;
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      errors.back() = error;
    }
  }
  return errors;
}

SaveOptions saving(const Communicator& comm) {
  SaveOptions options;
  options.comm = comm;
  options.overwrite = true;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  options.timeout = 60;
  return options;
}

Errors save_rows(const std::shared_ptr<FaultDisk>& disk, int64_t first) {
  return collect([&](Communicator comm) {
    save(row_state(comm, first), Location(disk->storage(comm.rank())), saving(comm));
  });
}

Errors load_rows(const std::shared_ptr<FaultDisk>& disk, int64_t first) {
  return collect([&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.resources.buffer_bytes = 1u << 20;
    options.resources.threads = 1;
    options.timeout = 60;
    const StateDict loaded =
        load(row_template(comm), Location(disk->storage(comm.rank())), options);
    EXPECT_EQ(elements(loaded.find("w")->get_if<ShardedTensor>()->data),
              elements(counting(DType::kFloat32, {1, 8}, first + 8 * comm.rank())));
    EXPECT_EQ(elements(*loaded.find("p")->get_if<TensorView>()),
              elements(counting(DType::kInt64, {3}, first)));
  });
}

void expect_no_errors(const Errors& errors) {
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

// The error that every rank threw; nullopt: no rank threw.
std::optional<Error> same_on_all(const Errors& errors) {
  for (const auto& error : errors) {
    EXPECT_EQ(error.has_value(), errors[0].has_value());
    if (error && errors[0]) {
      EXPECT_STREQ(error->what(), errors[0]->what());
    }
  }
  return errors[0];
}

int64_t saved_value(const std::shared_ptr<Storage>& storage) {
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  const int64_t first = checkpoint.read_object("step").as_int();
  expect_rows(Location(storage), first, kRanks);
  EXPECT_TRUE(checkpoint.verify().ok());
  return first;
}

// ---- Each call of a save and a load, with each error ----

struct Hit {
  StorageOp op = StorageOp::kStat;
  std::string name, to;
  int client = 0;
  bool switching = false;  // the switch was tried: it is put again, and then only files go
};

// Fails the k-th call, and records which call it was.
std::shared_ptr<FaultDisk> failing_at(const std::shared_ptr<Storage>& inner, uint64_t k,
                                      const FaultAction& failure, std::optional<Hit>& hit) {
  return FaultDisk::create(
      inner, [=, &hit, switching = std::make_shared<std::atomic<bool>>()](const StorageCall& call) {
        if (call.op == StorageOp::kRename && call.to == ".metadata") *switching = true;
        if (call.op == StorageOp::kPut && call.name == ".metadata") *switching = true;
        if (call.index != k) return FaultAction::pass();
        hit = Hit{call.op, std::string(call.name), std::string(call.to), call.client, *switching};
        return failure;
      });
}

void expect_reported(const Error& error, const Hit& hit, int number) {
  EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
  EXPECT_EQ(error.sys_errno(), number) << error.what();
  EXPECT_EQ(error.file(), hit.name);
  EXPECT_EQ(error.rank(), hit.client) << error.what();
}

// True for calls whose failure does not fail the save: finding and removing leftovers.
bool may_be_passed_over(const Hit& hit) {
  return !changes_storage(hit.op) || hit.op == StorageOp::kRemove || hit.switching;
}

// A failed save of several ranks leaves its note and nothing else.
void expect_only_notes(const std::shared_ptr<Storage>& storage) {
  for (const Leftover& file : find_leftovers(Location(storage))) {
    EXPECT_THAT(file.what, testing::StartsWith("note of the save ")) << file.name;
  }
}

class EachError : public FailingStorage, public testing::WithParamInterface<int> {};

TEST_P(EachError, AtEachCallOfASaveReachesEveryRankAndLeavesACheckpoint) {
  const auto old = memory_storage();
  expect_no_errors(save_rows(FaultDisk::create(old), kOld));
  const FileImage before = memory_image(*old);
  size_t failed = 0, passed_over = 0;
  for (uint64_t k = 0;; ++k) {
    const auto storage = memory_storage(before);
    std::optional<Hit> hit;
    const Errors errors =
        save_rows(failing_at(storage, k, FaultAction::fail(GetParam()), hit), kNew);
    if (!hit) break;
    SCOPED_TRACE("call " + std::to_string(k) + ": " + std::string(to_string(hit->op)) + " " +
                 hit->name + " by rank " + std::to_string(hit->client));
    const auto error = same_on_all(errors);
    const int64_t found = saved_value(storage);
    if (!error) {
      ++passed_over;
      EXPECT_TRUE(may_be_passed_over(*hit));
      EXPECT_EQ(found, kNew);
    } else {
      ++failed;
      expect_reported(*error, *hit, GetParam());
      EXPECT_EQ(found, kOld);
      expect_only_notes(storage);
    }
    expect_no_errors(save_rows(FaultDisk::create(storage), kLater));
    EXPECT_EQ(saved_value(storage), kLater);
    EXPECT_TRUE(find_leftovers(Location(storage)).empty());
    if (HasFailure()) return;
  }
  std::printf("[          ] save: %zu calls failed, %zu more passed over\n", failed, passed_over);
  EXPECT_GT(failed, 20u);
}

TEST_P(EachError, AtEachCallOfAFirstSaveLeavesNothingThatLooksLikeALostCheckpoint) {
  size_t failed = 0;
  for (uint64_t k = 0;; ++k) {
    const auto storage = memory_storage();
    std::optional<Hit> hit;
    const Errors errors =
        save_rows(failing_at(storage, k, FaultAction::fail(GetParam()), hit), kNew);
    if (!hit) break;
    SCOPED_TRACE("call " + std::to_string(k) + ": " + std::string(to_string(hit->op)) + " " +
                 hit->name);
    if (!same_on_all(errors)) continue;
    ++failed;
    try {
      ADD_FAILURE() << saved_value(storage);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kNotFound);
      EXPECT_THAT(error.what(), testing::Not(testing::HasSubstr("has lost")));
    }
    // Throws for a checkpoint that has only lost its metadata.
    if (!storage->list().empty()) remove_leftovers(Location(storage));
  }
  EXPECT_GT(failed, 20u);
}

// Each call of a save is executed though its error is reported, at once or later, or twice.
class EachAnswer : public FailingStorage,
                   public testing::WithParamInterface<std::pair<const char*, FaultAction>> {};

TEST_P(EachAnswer, ThatASaveLosesLeavesAWholeCheckpoint) {
  for (const auto& [make, exists] :
       {std::pair{&memory_storage, false}, std::pair{&memory_storage, true},
        std::pair{&memory_objects, false}, std::pair{&memory_objects, true}}) {
    size_t failed = 0;
    for (uint64_t k = 0;; ++k) {
      const auto storage = make({});
      if (exists) expect_no_errors(save_rows(FaultDisk::create(storage), kOld));
      std::optional<Hit> hit;
      const auto disk = failing_at(storage, k, GetParam().second, hit);
      const auto error = same_on_all(save_rows(disk, kNew));
      if (!hit) break;
      disk->execute_late();
      SCOPED_TRACE("call " + std::to_string(k) + ": " + std::string(to_string(hit->op)) + " " +
                   hit->name + " by rank " + std::to_string(hit->client));
      EXPECT_FALSE(error && hit->switching) << error->what();
      failed += error.has_value();
      if (!error) {
        EXPECT_EQ(saved_value(storage), kNew);
      } else if (exists) {
        EXPECT_EQ(saved_value(storage), kOld);
      } else {
        expect_error([&] { Checkpoint::open(Location(storage)); }, ErrorCode::kNotFound);
      }
      expect_no_errors(save_rows(FaultDisk::create(storage), kLater));
      EXPECT_EQ(saved_value(storage), kLater);
      // Without claims nobody removes what a failed save has left.
      EXPECT_TRUE(make == &memory_objects || find_leftovers(Location(storage)).empty());
      if (HasFailure()) return;
    }
    std::printf("[          ] %zu saves failed\n", failed);
  }
}

INSTANTIATE_TEST_SUITE_P(FailingStorage, EachAnswer,
                         testing::Values(std::pair{"lost", FaultAction::fail_after(EIO)},
                                         std::pair{"late", FaultAction::fail_late(EIO, 1)},
                                         std::pair{"later", FaultAction::fail_late(EIO, 7)},
                                         std::pair{"twice", FaultAction::repeat()}),
                         [](const auto& test) { return test.param.first; });

// The call may have been executed, or not, or only the sync after it is lost.
TEST_F(FailingStorage, ASwitchWhoseAnswerIsLostIsPutAgain) {
  for (const bool exists : {false, true}) {
    for (const StorageOp op : {StorageOp::kRename, StorageOp::kSettle}) {
      for (const FaultAction& lost : {FaultAction::fail(EIO), FaultAction::fail_after(EIO)}) {
        const auto storage = memory_storage();
        if (exists) expect_no_errors(save_rows(FaultDisk::create(storage), kOld));
        bool switching = false, failed = false;
        const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
          switching |= call.op == StorageOp::kRename && call.to == ".metadata";
          if (failed || !switching || call.op != op) return FaultAction::pass();
          failed = true;
          return lost;
        });
        SaveOptions options;
        options.overwrite = exists;
        save(row_state(solo(), kNew), disk->storage(), options);
        EXPECT_TRUE(failed);
        expect_rows(Location(memory_storage(disk->surviving_image(Survival::kNothingUnsynced))),
                    kNew, 1);
        EXPECT_TRUE(find_leftovers(Location(storage)).empty());
      }
    }
  }
}

TEST_F(FailingStorage, AFurtherTryOfASwitchNeverTakesAFileThatIsHalfWritten) {
  const auto storage = memory_storage();
  expect_no_errors(save_rows(FaultDisk::create(storage), kOld));
  int failures = 0;
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    // The switch is put without an answer; the file of the second try stays half written.
    const StorageOp failing[] = {StorageOp::kRename, StorageOp::kSync, StorageOp::kRemove};
    const bool is_first = call.op == StorageOp::kRename && call.to == ".metadata";
    if (failures == 3 || call.op != failing[failures] || (failures == 0 && !is_first)) {
      return FaultAction::pass();
    }
    return failures++ == 0 ? FaultAction::fail_after(EIO) : FaultAction::fail(EIO);
  });
  SaveOptions options;
  options.overwrite = true;
  save(row_state(solo(), kNew), disk->storage(), options);
  EXPECT_EQ(failures, 3);
  expect_rows(Location(memory_storage(disk->surviving_image(Survival::kNothingUnsynced))), kNew, 1);
  expect_no_errors(save_rows(FaultDisk::create(storage), kLater));
  EXPECT_TRUE(find_leftovers(Location(storage)).empty());
}

TEST_F(FailingStorage, ASwitchThatGetsNoAnswerLeavesAllAndSaysThatTheOutcomeIsNotKnown) {
  for (const FaultAction& lost : {FaultAction::fail(EIO), FaultAction::fail_after(EIO)}) {
    const auto storage = memory_storage();
    expect_no_errors(save_rows(FaultDisk::create(storage), kOld));
    const auto before = storage->list();
    const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
      const bool is_switch = call.op == StorageOp::kRename && call.to == ".metadata";
      return is_switch ? lost : FaultAction::pass();
    });
    const auto error = same_on_all(save_rows(disk, kNew));
    ASSERT_TRUE(error);
    EXPECT_EQ(error->sys_errno(), EIO);
    EXPECT_THAT(error->what(), testing::HasSubstr("not known whether the checkpoint exists"));
    EXPECT_EQ(saved_value(storage), lost.kind == FaultAction::Kind::kDo ? kNew : kOld);
    const auto after = storage->list();
    EXPECT_TRUE(std::ranges::includes(after, before));
    expect_no_errors(save_rows(FaultDisk::create(storage), kLater));
    EXPECT_EQ(saved_value(storage), kLater);
    EXPECT_TRUE(find_leftovers(Location(storage)).empty());
  }
}

// Whether the new names outlive a power failure is not known. They were free, so they are given up.
TEST_F(FailingStorage, ANewCheckpointWhoseLastSyncFailsIsTakenBackAndARetryWorks) {
  for (const std::string format : {"zarr", "torch_save"}) {
    SCOPED_TRACE(format);
    const auto parent = memory_storage();
    save(row_state(solo(), kOld), Location(parent->child("old")));
    bool renamed = false, failed = false;
    const auto disk = FaultDisk::create(parent, [&](const StorageCall& call) {
      const bool renames = call.op == StorageOp::kRename || call.op == StorageOp::kRenameDirectory;
      if (failed || (!renames && call.op != StorageOp::kSettle)) return FaultAction::pass();
      renamed |= renames && call.to == "new";
      failed = renamed && call.op != StorageOp::kRename;
      return failed ? FaultAction::fail_after(EIO) : FaultAction::pass();
    });
    ConvertOptions options;
    options.format = format;
    const auto make = [&] {
      convert(Location(disk->storage()->child("old")), Location(disk->storage()->child("new")),
              options);
    };
    expect_error(make, ErrorCode::kIo);
    EXPECT_TRUE(failed);
    expect_error([&] { Checkpoint::open(Location(parent->child("new"))); }, ErrorCode::kNotFound);
    make();
    if (format == "zarr") {
      expect_rows(Location(parent->child("new")), kOld, 1);
    } else {
      EXPECT_TRUE(parent->stat("new"));
    }
  }
}

TEST_P(EachError, AtEachCallOfALoadReachesEveryRank) {
  const auto storage = memory_storage();
  expect_no_errors(save_rows(FaultDisk::create(storage), kOld));
  size_t failed = 0;
  for (uint64_t k = 0;; ++k, ++failed) {
    std::optional<Hit> hit;
    const Errors errors =
        load_rows(failing_at(storage, k, FaultAction::fail(GetParam()), hit), kOld);
    if (!hit) break;
    SCOPED_TRACE("call " + std::to_string(k) + ": " + std::string(to_string(hit->op)) + " " +
                 hit->name + " by rank " + std::to_string(hit->client));
    const auto error = same_on_all(errors);
    ASSERT_TRUE(error);
    expect_reported(*error, *hit, GetParam());
    if (HasFailure()) return;
  }
  std::printf("[          ] load: %zu calls failed\n", failed);
  EXPECT_GT(failed, 10u);
}

INSTANTIATE_TEST_SUITE_P(FailingStorage, EachError,
                         testing::Values(EIO, ENOSPC, EDQUOT, EACCES, EROFS, ESTALE),
                         [](const auto& test) { return strerrorname_np(test.param); });

// ---- Real file systems ----

// While it exists, the process runs as the user nobody, to whom file modes apply. Does nothing if
// the process is not root.
class AsNobody {
 public:
  explicit AsNobody(const std::string& gets) {
    if (::geteuid() != 0) return;
    constexpr uid_t kNobody = 65534;
    EXPECT_EQ(::chown(gets.c_str(), kNobody, kNobody), 0);
    dropped_ = ::seteuid(kNobody) == 0;
    EXPECT_TRUE(dropped_);
  }
  ~AsNobody() {
    if (!dropped_) return;
    EXPECT_EQ(::seteuid(0), 0);
  }
  AsNobody(const AsNobody&) = delete;
  AsNobody& operator=(const AsNobody&) = delete;

 private:
  bool dropped_ = false;
};

// Runs `action` once, before the first call with this operation and name.
std::shared_ptr<FaultDisk> disturbed(const std::string& root, StorageOp op, const std::string& name,
                                     const std::function<void()>& action,
                                     std::shared_ptr<std::atomic<bool>> done) {
  return FaultDisk::create(posix_storage(root), [=](const StorageCall& call) {
    const bool here = call.op == op && call.name.find(name) != std::string_view::npos;
    if (here && !done->exchange(true)) action();
    return FaultAction::pass();
  });
}

struct Phase {
  StorageOp op;
  const char* name;
};

constexpr Phase kSavePhases[] = {{StorageOp::kLock, ""},           // opening
                                 {StorageOp::kCreate, ".distcp"},  // writing
                                 {StorageOp::kAppend, ".distcp"},
                                 {StorageOp::kCreate, ".manifest"},  // publishing
                                 {StorageOp::kRename, ".manifest"},
                                 {StorageOp::kCreate, ".metadata"},
                                 {StorageOp::kRename, ".metadata"}};

constexpr Phase kLoadPhases[] = {{StorageOp::kList, ""},  // opening
                                 {StorageOp::kOpen, ".metadata"},
                                 {StorageOp::kOpen, ".manifest"},
                                 {StorageOp::kOpen, ".distcp"}};  // reading

class RealFiles : public FailingStorage {
 protected:
  // The error that all ranks throw when `action` happens during a save or load.
  std::optional<Error> disturb(bool saves, const Phase& phase,
                               const std::function<void()>& action) {
    const auto done = std::make_shared<std::atomic<bool>>(false);
    const auto disk = disturbed(root_, phase.op, phase.name, action, done);
    const auto error = same_on_all(saves ? save_rows(disk, kNew) : load_rows(disk, kOld));
    EXPECT_TRUE(*done);
    return error;
  }
  // Removes the folder in one step, whatever is being written there.
  void take_away() const {
    const std::string gone = folder_.path() + "/gone";
    fs::rename(root_, gone);
    std::error_code ignored;
    fs::remove_all(gone, ignored);
  }
  void save_plainly(int64_t first) const {
    expect_no_errors(save_rows(FaultDisk::create(posix_storage(root_)), first));
  }

  const TempDirectory folder_;
  const std::string root_ = folder_.path() + "/checkpoint";
};

// The save does not log a note either, because it has left none.
TEST_F(RealFiles, ASaveThatHasMadeNothingLogsNothing) {
  const TempDirectory folder;
  std::ofstream(folder.path() + "/file") << "no directory";
  std::vector<std::string> logged;
  set_log_level(LogLevel::kInfo);
  set_log_sink([&](LogLevel, std::string_view text) { logged.emplace_back(text); });
  EXPECT_THROW(save(row_state(solo(), kNew), folder.path() + "/file/ckpt", saving(solo())), Error);
  set_log_sink({});
  EXPECT_THAT(logged, testing::IsEmpty());
}

TEST_F(RealFiles, ADirectoryRemovedUnderWayIsReportedOnEveryRank) {
  for (const bool saves : {true, false}) {
    for (const Phase& phase : saves ? std::span<const Phase>(kSavePhases) : kLoadPhases) {
      SCOPED_TRACE(std::string(to_string(phase.op)) + " " + phase.name);
      save_plainly(kOld);
      const auto error = disturb(saves, phase, [&] { take_away(); });
      if (phase.op == StorageOp::kLock) {  // nothing was written yet: the save begins again
        EXPECT_FALSE(error) << error->what();
        EXPECT_EQ(saved_value(posix_storage(root_)), kNew);
        continue;
      }
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kNotFound) << error->what();
      // A load that finds nothing reports that; every other error has the file and its errno.
      const bool nothing_there = error->message().starts_with("no checkpoint at") ||
                                 error->message().starts_with("no torch_dist checkpoint");
      EXPECT_TRUE(nothing_there || error->sys_errno() == ENOENT) << error->what();
      EXPECT_TRUE(nothing_there || !error->file().empty()) << error->what();
      save_plainly(kLater);
      EXPECT_EQ(saved_value(posix_storage(root_)), kLater);
    }
  }
}

TEST_F(RealFiles, PermissionLostUnderWayIsReportedOnEveryRank) {
  const AsNobody nobody(folder_.path());
  for (const bool saves : {true, false}) {
    for (const Phase& phase : saves ? std::span<const Phase>(kSavePhases) : kLoadPhases) {
      SCOPED_TRACE(std::string(to_string(phase.op)) + " " + phase.name);
      fs::remove_all(root_);
      save_plainly(kOld);
      const auto error = disturb(saves, phase, [&] { EXPECT_EQ(::chmod(root_.c_str(), 0), 0); });
      EXPECT_EQ(::chmod(root_.c_str(), 0755), 0);
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kIo) << error->what();
      EXPECT_EQ(error->sys_errno(), EACCES) << error->what();
      EXPECT_FALSE(error->file().empty()) << error->what();
      EXPECT_EQ(saved_value(posix_storage(root_)), kOld);
      save_plainly(kLater);
      EXPECT_EQ(saved_value(posix_storage(root_)), kLater);
    }
  }
}

// Rows of two ranks, 3 MiB each.
StateDict large_state(const Communicator& comm) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets("w", counting(DType::kFloat32, {3 << 18}),
                                                {{0, comm.rank(), comm.size()}});
  return state;
}

// Without permission to mount, the calls that would fill the disk are made to fail.
TEST_F(RealFiles, ARealFullDiskIsReportedOnEveryRankAndTheOldCheckpointStays) {
  const SmallMount mount;
  const auto real = posix_storage(mount ? mount.path() : root_);
  expect_no_errors(save_rows(FaultDisk::create(real), kOld));
  const auto names = real->list();
  const auto disk = FaultDisk::create(real, [&](const StorageCall& call) {
    const bool full = !mount && call.op == StorageOp::kAppend && call.offset > (1u << 20);
    return full ? FaultAction::fail(ENOSPC) : FaultAction::pass();
  });
  const auto error = same_on_all(collect([&](Communicator comm) {
    save(large_state(comm), Location(disk->storage(comm.rank())), saving(comm));
  }));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->sys_errno(), ENOSPC) << error->what();
  EXPECT_THAT(error->file(), testing::HasSubstr(".distcp"));
  auto left = real->list();
  std::erase_if(left, [](const std::string& name) { return name.ends_with(".begun"); });
  EXPECT_EQ(left, names);  // including the note of the save of several ranks
  EXPECT_EQ(saved_value(real), kOld);
  expect_no_errors(save_rows(FaultDisk::create(real), kNew));
  EXPECT_EQ(saved_value(real), kNew);
}

TEST_F(RealFiles, AReadOnlyMountLoadsAndVerifies) {
  const SmallMount mount;
  const std::string root = mount ? mount.path() : root_;
  expect_no_errors(save_rows(FaultDisk::create(posix_storage(root)), kOld));
  if (mount) {
    ASSERT_TRUE(mount.make_read_only());
  } else {
    ASSERT_EQ(::chmod(root.c_str(), 0555), 0);
  }
  const auto storage = posix_storage(root);
  EXPECT_EQ(saved_value(storage), kOld);
  expect_no_errors(load_rows(FaultDisk::create(storage), kOld));
  const auto error = same_on_all(save_rows(FaultDisk::create(storage), kNew));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->sys_errno(), mount ? EROFS : EACCES);
  EXPECT_EQ(saved_value(storage), kOld);
  EXPECT_TRUE(mount || ::chmod(root.c_str(), 0755) == 0);
}

TEST_F(RealFiles, ACheckpointOfReadOnlyFilesAndDirectoriesLoadsAndVerifies) {
  const AsNobody nobody(folder_.path());
  save_plainly(kOld);
  std::vector<fs::path> paths{root_};
  for (const auto& entry : fs::recursive_directory_iterator(root_)) paths.push_back(entry.path());
  const auto set_mode = [&](unsigned directory, unsigned file) {
    for (const fs::path& path : paths) {
      const unsigned mode = fs::is_directory(path) ? directory : file;
      EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    }
  };
  set_mode(0555, 0444);
  EXPECT_EQ(saved_value(posix_storage(root_)), kOld);
  expect_no_errors(load_rows(FaultDisk::create(posix_storage(root_)), kOld));
  const auto error = same_on_all(save_rows(FaultDisk::create(posix_storage(root_)), kNew));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->sys_errno(), EACCES);
  set_mode(0755, 0644);
  EXPECT_EQ(saved_value(posix_storage(root_)), kOld);
}

}  // namespace tilestone::failing_storage_test
