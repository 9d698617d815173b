// Changes of an existing checkpoint, remove_keys(), repair() and the removal of a run's step, in
// which the machine crashes at every storage call, or each call goes wrong in each way. What is
// left is the old checkpoint or the changed one, and the same call completes it.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/removal.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::crash_points_of_changes_test {

constexpr uint64_t kAnswerStride = 3;

// Returns whether all was done, or throws.
using Change = std::function<bool(const Location& location)>;
// Checks what is left, and returns whether it is the changed checkpoint.
using Judge = std::function<bool(const FileImage& image)>;

// Judges everything that a crash or a failure at any call of `change` may leave of `image`. Once
// `change` has returned, it is the changed checkpoint.
void try_everywhere(const FileImage& image, const Change& change, const Judge& judge,
                    std::shared_ptr<Storage> (*make)(FileImage) = &memory_storage) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  bool ended = false, fails = false;
  const auto run = [&](const FaultHook& hook) {
    auto disk = FaultDisk::create(make(image), hook);
    ended = false;
    try {
      ended = change(Location(disk->storage()));
    } catch (const Error& error) {
      EXPECT_TRUE(fails || disk->crashed()) << error.what();
    }
    return disk;
  };
  for (; !testing::Test::HasFailure(); fails = true) {
    int changed = 0;
    const auto check = [&](const FileImage& left, uint64_t) {
      const bool is_changed = judge(left);
      EXPECT_TRUE(is_changed || !ended);
      changed += is_changed ? 1 : 0;
    };
    const uint64_t judged =
        fails ? fail_everywhere(run, check, kAnswerStride) : crash_everywhere(run, check);
    std::cout << judged << (fails ? " calls went wrong, " : " crash points in all, ") << changed
              << " with the changed checkpoint\n";
    EXPECT_GT(judged, 8u);
    EXPECT_GT(changed, 0);
    if (fails) break;
  }
  set_log_level(level);
}

FileImage saved(const std::function<StateDict(int rank)>& state_of, SaveOptions options) {
  const auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    SaveOptions own = options;
    own.comm = comm;
    own.resources.buffer_bytes = 1u << 20;
    own.resources.threads = 1;
    save(state_of(comm.rank()), Location(storage), own);
  });
  return memory_image(*storage);
}

// ---- Removal of keys

const std::vector<std::string> kAll = {"drop.a", "drop.b", "keep"};
const std::vector<std::string> kKept = {"keep"};

// Nothing of rank 1's file remains after a removal.
FileImage to_remove_from() {
  SaveOptions options;
  options.dialect = megatron_dialect();
  const auto whole = [](const std::string& key) {
    return ShardedTensor::from_rank_offsets(key, counting(DType::kInt32, {40}, 7), {});
  };
  return saved(
      [&](int rank) {
        StateDict state;
        state["step"] = 3;
        if (rank == 0) {
          state["a"] = whole("drop.a");
          state["k"] = whole("keep");
        } else {
          state["b"] = whole("drop.b");
        }
        return state;
      },
      options);
}

std::vector<std::string> keys_at(const std::shared_ptr<Storage>& storage) {
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_TRUE(checkpoint.verify().ok());
  EXPECT_EQ(elements(checkpoint.read("keep")), elements(counting(DType::kInt32, {40}, 7)));
  EXPECT_EQ(checkpoint.common(), Value::dict({{"step", 3}}));
  return checkpoint.keys();
}

// `files`: how many data files there may be after gc has cleaned up.
void remove_everywhere(const FileImage& image, int64_t files) {
  try_everywhere(
      image,
      [](const Location& location) {
        remove_keys(location, "drop.");
        return true;
      },
      [&](const FileImage& left) {
        const auto storage = memory_storage(left);
        const auto keys = keys_at(storage);
        EXPECT_TRUE(keys == kAll || keys == kKept);
        remove_keys(Location(storage), "drop.");
        EXPECT_EQ(keys_at(storage), kKept);
        remove_leftovers(Location(storage));
        const std::vector<std::string> names = storage->list();
        EXPECT_LE(std::count_if(names.begin(), names.end(),
                                [](const auto& name) { return name.ends_with(".distcp"); }),
                  files);
        return keys == kKept;
      });
}

TEST(CrashesOfRemovals, LeaveTheOldCheckpointOrTheNewOne) {
  remove_everywhere(to_remove_from(), 1);
}

// It is not known whether a file of another writer, of which nothing is left, may go.
TEST(CrashesOfRemovals, AlsoInAnotherWritersCheckpoint) {
  remove_everywhere(as_of_another_writer(to_remove_from()), 2);
}

// ---- Removal of a step

constexpr const char* kStep = "step-00000007";

// What is left is the step or none, and the next pruning, or a save of that step, clears the rest.
void remove_step_everywhere(const std::function<void(SaveOptions&)>& choose,
                            std::shared_ptr<Storage> (*make)(FileImage) = &memory_storage) {
  SaveOptions options;
  choose(options);
  FileImage image;
  for (auto& [name, bytes] : saved([](int rank) { return row_state(rank, 2, 500); }, options)) {
    const bool is_claim = name == ".tilestone/lock";  // none in an object store
    if (!is_claim || make == &memory_storage) image[kStep + ("/" + name)] = std::move(bytes);
  }
  int points = 0;
  try_everywhere(
      image, [](const Location& run) { return RunDirectory(run).remove(kStep) == Removed::kNow; },
      [&](const FileImage& left) {
        FileImage later = left;
        if (make != &memory_storage)
          later.erase(kStep + std::string("/.tilestone/lock"));  // lapsed
        const auto storage = make(std::move(later));
        const RunDirectory run((Location(storage)));
        const auto found = run.find(7);
        const bool stands = found && found->state == StepState::kDurable;
        if (stands) {
          EXPECT_TRUE(Checkpoint::open(run.at(kStep)).verify().ok());
          return false;
        }
        if (found) {
          EXPECT_EQ(found->state, StepState::kUnfinished) << found->problem;
        }
        EXPECT_EQ(run.latest(), std::nullopt);
        if (++points % 2 == 0) {
          save(row_state(0, 1, 900), run.at(kStep), options);
          expect_rows(run.at(kStep), 900, 1);
          EXPECT_EQ(run.remove(kStep), Removed::kNow);
        }
        run.remove_remains(8);
        EXPECT_TRUE(storage->list().empty()) << storage->list().front();
        return true;
      },
      make);
}

TEST(CrashesOfStepRemovals, LeaveTheStepOrNone) {
  remove_step_everywhere([](SaveOptions&) {});
}

TEST(CrashesOfStepRemovals, AlsoInAnObjectStore) {
  remove_step_everywhere([](SaveOptions&) {}, &memory_objects);
}

TEST(CrashesOfStepRemovals, AlsoOfFilesWithFixedNames) {
  remove_step_everywhere([](SaveOptions& options) { options.dialect = megatron_dialect(); });
  remove_step_everywhere([](SaveOptions& options) { options.format = zarr_format(); });
}

// ---- Repair

// Both ranks hold "all", and each copies what the other one writes.
FileImage with_copies() {
  SaveOptions options;
  options.copies.emplace();
  options.copies->group = {0, 1};
  FileImage image = saved(
      [&](int rank) {
        StateDict state;
        for (const char* key : {"a", "b"}) {
          ShardedTensor tensor = ShardedTensor::from_rank_offsets(
              key, counting(DType::kFloat32, {3000}, key[0]), {}, {rank});
          tensor.holders = {0, 1};
          state[key] = tensor;
        }
        return state;
      },
      options);
  image.erase(".tilestone/lock");
  return image;
}

bool repair_at(const Location& location) { return repair(location).now.ok(); }

TEST(CrashesOfRepairs, LeaveAMissingFileMissingOrWhole) {
  const FileImage image = with_copies();
  const auto file = std::find_if(image.begin(), image.end(), [](const auto& candidate) {
    return candidate.first.ends_with(".distcp");
  });
  ASSERT_NE(file, image.end());
  FileImage without = image;
  without.erase(file->first);
  try_everywhere(without, repair_at, [&](const FileImage& left) {
    const auto found = left.find(file->first);
    if (found != left.end()) {
      EXPECT_EQ(found->second, file->second);
    }
    EXPECT_TRUE(repair_at(Location(memory_storage(left))));
    return found != left.end();
  });
}

TEST(CrashesOfRepairs, LeaveADamagedFileAsItWasOrMended) {
  FileImage image = with_copies();
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const auto tensor = static_cast<uint32_t>(metadata.find_tensor("a") - metadata.tensors.data());
  const ItemLocation& at = metadata.place(tensor, 0, kNoCopy);
  image[metadata.files[at.file]][at.offset + at.length / 2] ^= std::byte{4};
  try_everywhere(image, repair_at, [&](const FileImage& left) {
    const auto storage = memory_storage(left);
    const VerifyReport report = Checkpoint::open(Location(storage)).verify();
    EXPECT_LE(report.damages.size(), 1u);
    for (const Damage& damage : report.damages) EXPECT_EQ(damage.key, "a");
    EXPECT_TRUE(repair_at(Location(storage)));
    return report.ok();
  });
}

}  // namespace tilestone::crash_points_of_changes_test
