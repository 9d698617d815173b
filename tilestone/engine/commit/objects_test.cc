// Saves and removals where there are no directories and renames, a put can ask for a tag, and
// claims are leases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/attributes_internal.h"
#include "tilestone/engine/commit/removal.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/commit/whole_removal_internal.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::objects_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kOld = 100, kNew = 500, kOther = 900;

void save_at(const std::shared_ptr<Storage>& storage, int64_t value, SaveOptions options = {}) {
  options.resources.threads = 1;
  save(row_state(0, 1, value), Location(storage), options);
}

SaveOptions replacing() {
  SaveOptions options;
  options.overwrite = true;
  return options;
}

// As if whoever has the claim of the place had been stopped until it had lapsed.
void lapse(Storage& place) {
  place.remove(".tilestone/lock");
  std::this_thread::sleep_for(4 * MemoryObjects::kLeasePeriod);
}

TEST(Objects, ASaveLeavesItsFilesAndAReplacementRemovesTheOldOnes) {
  const auto store = memory_objects();
  save_at(store, kOld);
  const size_t files = store->list().size();
  expect_error([&] { save_at(store, kNew); }, ErrorCode::kAlreadyExists, "exists");
  save_at(store, kNew, replacing());
  expect_rows(Location(store), kNew, 1);
  EXPECT_THAT(store->list(), testing::SizeIs(files));
}

// Another save publishes between the first one's look and its switch.
TEST(Objects, OfTwoSavesOfMegatronsDialectTheSecondRemovesNothingOfTheFirst) {
  for (const bool overwrite : {false, true}) {
    const auto store = memory_objects();
    SaveOptions megatron;
    megatron.dialect = megatron_dialect();
    megatron.overwrite = overwrite;
    bool is_first = true;
    const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
      if (call.op == StorageOp::kCreate && call.name == ".metadata" &&
          std::exchange(is_first, false)) {
        lapse(*store);
        save_at(store, kOther, megatron);
      }
      return FaultAction::pass();
    });
    expect_error([&] { save_at(disk->storage(), kNew, megatron); }, ErrorCode::kAlreadyExists, "");
    EXPECT_FALSE(is_first);
    expect_rows(Location(store), kOther, 1);
  }
}

// The step is removed, or saved anew, between two requests of its removal.
TEST(Objects, ARemovalThatComesLateLeavesTheStepThatWasSavedAnew) {
  for (const std::string at : {".tilestone/removed", ".metadata"}) {
    for (const StorageOp op : {StorageOp::kPut, StorageOp::kStat, StorageOp::kOpen}) {
      const auto store = memory_objects();
      const auto folder = store->child("step-00000010");
      save_at(folder, kOld);
      bool is_first = true;
      const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
        if (call.op != op || call.name != "step-00000010/" + at || !is_first) {
          return FaultAction::pass();
        }
        is_first = false;
        lapse(*folder);
        RunDirectory(Location(store)).remove("step-00000010");
        save_at(folder, kNew);
        return FaultAction::pass();
      });
      const RunDirectory run(Location(disk->storage()));
      const auto seen = RunDirectory(Location(store)).find(10);
      run.remove(*seen);
      if (!is_first) expect_rows(Location(folder), kNew, 1);
    }
  }
}

TEST(Objects, ADamagedStepIsRemoved) {
  const auto store = memory_objects();
  const auto folder = store->child("step-00000010");
  save_at(folder, kOld);
  folder->put(".metadata", as_bytes("no pickle"), Condition::always(), "x", Deadline::never());
  EXPECT_EQ(RunDirectory(Location(store)).remove("step-00000010"), Removed::kNow);
  EXPECT_THAT(store->list(), testing::IsEmpty());
}

TEST(Objects, GcEndsARemovalThatHasBegun) {
  const auto store = memory_objects();
  save_at(store, kOld);
  ASSERT_TRUE(engine::begin_removal(*store, nullptr));
  expect_error([&] { Checkpoint::open(Location(store)); }, ErrorCode::kNotFound, "it was removed");
  EXPECT_FALSE(remove_leftovers(Location(store)).empty());
  EXPECT_THAT(store->list(), testing::IsEmpty());
}

TEST(Objects, OfTwoSavesTheSecondSaysWhoWasFirstAndLosesNothing) {
  for (const bool exists : {false, true}) {
    const auto store = memory_objects();
    if (exists) save_at(store, kOld);
    std::string first;
    const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
      if (call.op != StorageOp::kPut || call.name != ".metadata" || !first.empty()) {
        return FaultAction::pass();
      }
      first = "is being saved";
      store->remove(".tilestone/lock");  // the put has begun in time, and comes late
      save_at(store, kOther, exists ? replacing() : SaveOptions());
      first = Checkpoint::open(Location(store)).metadata().save_id;
      return FaultAction::pass();
    });
    expect_error([&] { save_at(disk->storage(), kNew, replacing()); }, ErrorCode::kAlreadyExists,
                 "has published a checkpoint");
    EXPECT_FALSE(first.empty());
    expect_rows(Location(store), kOther, 1);
    for (const std::string& name : store->list()) {
      EXPECT_THAT(name, testing::AnyOf(HasSubstr(first), ".metadata"));
    }
  }
}

TEST(Objects, FixedNamesReplaceThoseOfTheSameDialectAndZarrGoesNowhere) {
  const auto store = memory_objects();
  SaveOptions megatron = replacing();
  megatron.dialect = megatron_dialect();
  save_at(store, kOld, megatron);
  const size_t files = store->list().size();
  save_at(store, kNew, megatron);
  expect_rows(Location(store), kNew, 1);
  EXPECT_THAT(store->list(), testing::SizeIs(files));
  expect_error([&] { save_at(store, kOther, replacing()); }, ErrorCode::kUnsupported, "prefix");
  expect_rows(Location(store), kNew, 1);
  SaveOptions zarr;
  zarr.format = zarr_format();
  const auto empty = memory_objects();
  expect_error([&] { save_at(empty, kNew, zarr); }, ErrorCode::kUnsupported, "torch_dist");
  EXPECT_THAT(empty->list(), testing::IsEmpty());
}

// Also at each request of the index, whose files have the names of every such checkpoint.
TEST(Objects, WhatAKilledSaveLeavesIsRemovedByGcAndByTheNextSave) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  bool is_killed = true;
  for (uint64_t at = 0; is_killed; ++at) {
    for (const bool cleans : {false, true}) {
      SCOPED_TRACE(at);
      const auto store = memory_objects();
      const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
        return call.index == at ? FaultAction::die_after() : FaultAction::pass();
      });
      SaveOptions megatron;
      megatron.dialect = megatron_dialect();
      is_killed = false;
      try {
        save_at(disk->storage(), kOld, megatron);
      } catch (const Error&) {
        is_killed = true;
      }
      const bool exists = store->stat("metadata.json").has_value();
      if (cleans && !store->list().empty()) remove_leftovers(Location(store));
      if (cleans && !exists) {
        EXPECT_THAT(store->list(), testing::IsEmpty());
      }
      if (!exists) save_at(store, kNew, megatron);
      expect_rows(Location(store), exists ? kOld : kNew, 1);
      EXPECT_TRUE(Checkpoint::open(Location(store)).verify().ok());
      if (!exists || cleans) {
        EXPECT_TRUE(find_leftovers(Location(store)).empty());
      }
    }
  }
  set_log_level(level);
}

// The replacement is killed when it has put this file, between two requests of the reader.
TEST(Objects, AReaderOfFilesWithFixedNamesFindsNoMixtureOfTwoCheckpoints) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  SaveOptions megatron = replacing();
  megatron.dialect = megatron_dialect();
  for (const char* at : {"common.pt", "metadata.json"}) {
    const auto store = memory_objects();
    save_at(store, kOld, megatron);
    const auto writer = FaultDisk::create(store, [&](const StorageCall& call) {
      const bool is_last = call.op == StorageOp::kPut && call.name == at;
      return is_last ? FaultAction::die_after() : FaultAction::pass();
    });
    bool is_first = true;
    const auto reader = FaultDisk::create(store, [&](const StorageCall& call) {
      if (call.op == StorageOp::kOpen && call.name == "common.pt" &&
          std::exchange(is_first, false)) {
        EXPECT_THROW(save_at(writer->storage(), kNew, megatron), Error);
      }
      return FaultAction::pass();
    });
    EXPECT_EQ(step_of(Checkpoint::open(Location(reader->storage()))).as_int(), kNew);
    EXPECT_FALSE(is_first);
    expect_rows(Location(store), kNew, 1);
  }
  set_log_level(level);
}

// Of the two checkpoints one is whole for every reader of ours, whichever files stand.
TEST(Objects, AKilledReplacementOfFilesWithFixedNamesLeavesTheOldOrTheNewCheckpoint) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  SaveOptions megatron = replacing();
  megatron.dialect = megatron_dialect();
  bool is_killed = true;
  for (uint64_t at = 0; is_killed; ++at) {
    for (const bool cleans : {false, true}) {
      SCOPED_TRACE(at);
      const auto store = memory_objects();
      save_at(store, kOld, megatron);
      const size_t files = store->list().size();
      const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
        return call.index == at ? FaultAction::die_after() : FaultAction::pass();
      });
      is_killed = false;
      try {
        save_at(disk->storage(), kNew, megatron);
      } catch (const Error&) {
        is_killed = true;
      }
      const int64_t stands = step_of(Checkpoint::open(Location(store))).as_int();
      EXPECT_TRUE(stands == kOld || stands == kNew);
      EXPECT_TRUE(is_killed || stands == kNew);
      expect_rows(Location(store), stands, 1);
      const auto copy = memory_storage(memory_image(*store));  // on a disk
      remove_leftovers(Location(copy));
      EXPECT_TRUE(Checkpoint::open(Location(copy)).verify().ok());
      if (cleans) remove_leftovers(Location(store));
      if (!cleans) save_at(store, kOther, megatron);
      expect_rows(Location(store), cleans ? stands : kOther, 1);
      EXPECT_TRUE(Checkpoint::open(Location(store)).verify().ok());
      EXPECT_THAT(store->list(), testing::SizeIs(files));
    }
  }
  set_log_level(level);
}

// It was stopped while it listed the files, and a save has begun there since.
TEST(Objects, ACleaningThatHasLostItsClaimRemovesNothing) {
  const auto store = memory_objects();
  const std::string id = "01234567-89ab-4def-8123-456789abcdef";
  put_file(*store, ".tilestone/" + id + ".begun", {});
  put_file(*store, id + "__0_0.distcp", as_bytes("data"));
  const size_t files = store->list().size();
  bool has_claim = false;
  const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
    if (std::exchange(has_claim, has_claim || call.op == StorageOp::kLock) &&
        call.op == StorageOp::kList) {
      lapse(*store);
    }
    return FaultAction::pass();
  });
  expect_error([&] { remove_leftovers(Location(disk->storage())); }, ErrorCode::kAlreadyExists,
               "under way");
  EXPECT_THAT(store->list(), testing::SizeIs(files));
}

// Its claim lapses before the switch: another save may have begun, and removed its files.
TEST(Objects, ASaveThatHasLostItsClaimIsNotPublished) {
  const auto store = memory_objects();
  bool is_first = true;
  const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
    const bool prepares = call.op == StorageOp::kCreate && call.name.ends_with(".metadata.tmp");
    if (prepares && std::exchange(is_first, false)) {
      lapse(*store);
      remove_leftovers(Location(store));
    }
    return FaultAction::pass();
  });
  expect_error([&] { save_at(disk->storage(), kNew); }, ErrorCode::kIo, "");
  EXPECT_FALSE(is_first);
  EXPECT_FALSE(store->stat(".metadata"));
}

// Its switch is sent in time and executed late, when gc has taken it for dead.
TEST(Objects, ASaveWhoseSwitchComesLateSaysThatItsFilesAreGone) {
  class Late : public MemoryObjects {
   public:
    Late() : MemoryObjects({}) {}
    std::optional<std::string> put_for_tag(const std::string& name, ByteView bytes,
                                           const Condition& condition, const std::string& scratch,
                                           Deadline deadline) override {
      if (name == ".metadata" && std::exchange(is_first, false)) {
        lapse(*this);
        EXPECT_FALSE(remove_leftovers(Location(shared_from_this())).empty());
        deadline = Deadline::never();
      }
      return MemoryObjects::put_for_tag(name, bytes, condition, scratch, deadline);
    }
    bool is_first = true;
  };
  const auto store = std::make_shared<Late>();
  expect_error([&] { save_at(store, kNew); }, ErrorCode::kCorrupt, "has removed its files");
  EXPECT_FALSE(store->is_first);
  save_at(store, kOther, replacing());
  expect_rows(Location(store), kOther, 1);
}

TEST(Objects, ARunIsSavedPrunedAndRestored) {
  const auto store = memory_objects();
  ManagerOptions options;
  options.every = 10;
  options.keep = Keep{.last = 2};
  CheckpointManager manager((Location(store)), options);
  for (const uint64_t step : {10, 20, 30}) {
    manager.save(step, row_state(0, 1, static_cast<int64_t>(step)));
  }
  manager.wait();
  const RunDirectory run((Location(store)));
  std::vector<uint64_t> steps;
  for (const StepInfo& step : run.steps()) {
    EXPECT_EQ(step.state, StepState::kDurable) << step.problem;
    steps.push_back(step.step);
  }
  EXPECT_THAT(steps, ElementsAre(20, 30));
  EXPECT_EQ(run.latest(), 30u);
}

TEST(Objects, AMetricIsAddedToAStepAndKeysAreRemovedFromACheckpoint) {
  const auto store = memory_objects();
  save_at(store, kOld);
  engine::set_attributes(store, {{"metric.loss", "0.5"}}, Deadline::never());
  EXPECT_EQ(Checkpoint::open(Location(store)).save_record()->attributes.at("metric.loss"), "0.5");
  const auto other = memory_objects();
  SaveOptions megatron;
  megatron.dialect = megatron_dialect();
  save_at(other, kOld, megatron);
  EXPECT_THAT(remove_keys(Location(other), "w").keys, ElementsAre("w"));
  EXPECT_TRUE(Checkpoint::open(Location(other)).verify().ok());
}

// Other keys are removed between the look and the switch.
TEST(Objects, OfTwoRemovalsOfKeysTheSecondChangesNothing) {
  const auto store = memory_objects();
  SaveOptions megatron;
  megatron.dialect = megatron_dialect();
  StateDict state;
  for (const char* key : {"a", "b", "c"}) {
    state[key] = ShardedTensor::from_rank_offsets(key, counting(DType::kInt32, {4}), {});
  }
  megatron.resources.threads = 1;
  save(state, Location(store), megatron);
  bool is_first = true;
  const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
    if (call.op == StorageOp::kPut && call.name == ".metadata" && std::exchange(is_first, false)) {
      store->remove(".tilestone/lock");  // the put has begun in time, and comes late
      remove_keys(Location(store), "a");
    }
    return FaultAction::pass();
  });
  expect_error([&] { remove_keys(Location(disk->storage()), "b"); }, ErrorCode::kAlreadyExists,
               "has published a checkpoint");
  const Checkpoint checkpoint = Checkpoint::open(Location(store));
  EXPECT_TRUE(checkpoint.verify().ok());
  EXPECT_THAT(checkpoint.keys(), ElementsAre("b", "c"));
}

// A removal by who holds no claim leaves what another save has begun to write.
TEST(Objects, ARemovalWithoutAClaimLeavesTheFilesOfASaveThatIsUnderWay) {
  const auto disk = FaultDisk::create(memory_objects(), [&](const StorageCall& call) {
    return call.op == StorageOp::kLock ? FaultAction::fail(ENOTSUP) : FaultAction::pass();
  });
  const auto store = disk->storage();
  const auto folder = store->child("step-00000010");
  save_at(folder, kOld);
  const std::string id = "01234567-89ab-4def-8123-456789abcdef";
  const std::string file = "__0_0.distcp";
  folder->create(id + file)->close();
  EXPECT_EQ(RunDirectory(Location(store)).remove("step-00000010"), Removed::kNow);
  EXPECT_THAT(folder->list(), ElementsAre(id + file));
}

TEST(Objects, WhoReadsAnIndexThatIsReplacedFindsTheNewOne) {
  for (const bool saves : {false, true}) {
    const auto store = memory_objects();
    save_at(store, kOld);
    bool is_first = true;
    const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
      const bool reads = call.op == StorageOp::kRead && call.name == ".metadata";
      if (reads && std::exchange(is_first, false)) {
        lapse(*store);
        save_at(store, kOther, replacing());
      }
      return FaultAction::pass();
    });
    if (saves) {
      expect_error([&] { save_at(disk->storage(), kNew, replacing()); }, ErrorCode::kIo,
                   "has lost its claim");
    }
    expect_rows(Location(disk->storage()), kOther, 1);
    EXPECT_FALSE(is_first);
  }
}

TEST(Objects, DataFilesAreNotReadToLearnTheirSizes) {
  std::multiset<StorageOp> calls;
  const auto disk = FaultDisk::create(memory_objects(), [&](const StorageCall& call) {
    if (call.name.ends_with(".distcp")) calls.insert(call.op);
    return FaultAction::pass();
  });
  save_at(disk->storage()->child("step-00000010"), kOld);
  EXPECT_EQ(calls.count(StorageOp::kOpen), 0u);
  calls.clear();
  const auto step = RunDirectory(Location(disk->storage())).find(10);
  EXPECT_EQ(step->state, StepState::kDurable);
  EXPECT_GT(step->bytes, 0u);
  EXPECT_TRUE(calls.empty());
}

}  // namespace tilestone::objects_test
