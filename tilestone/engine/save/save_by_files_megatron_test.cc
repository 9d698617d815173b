// Saves without a communicator in Megatron-Core's dialect: its index files have fixed names, and a
// checkpoint needs all three.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>

#include "tilestone/base/error.h"
#include "tilestone/base/error_testing.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::save_by_files_megatron_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Something happens at every n-th storage call of a save.
constexpr uint64_t kStride = kReduced ? 3 : 1;

constexpr const char* kFirst = "the first run";
constexpr const char* kSecond = "the second run";

SaveOptions by_files(int rank, int ranks, const std::string& token = kFirst) {
  SaveOptions options;
  options.by_files = ByFiles{rank, ranks, token, 0, false};
  options.dialect = megatron_dialect();
  options.timeout = 20;
  options.resources.threads = 1;
  return options;
}

// Rows of "w", one object per rank, an object whose main replica the last rank has, and common
// state.
StateDict state_of(int rank, int ranks, int64_t first) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, first + 8 * rank), {{0, rank, ranks}});
  state["rng"] = ShardedObject::make("rng", Value(rank), {ranks}, {rank});
  state["extra"] = ShardedObject::make("extra", Value("x"), {1}, {0}, {ranks - 1 - rank});
  state["p"] = counting(DType::kInt64, {3}, first);
  state["step"] = Value(first);
  return state;
}

SaveResult save_rank(const Location& location, int rank, int ranks, int64_t first,
                     const std::string& token = kFirst) {
  return save(state_of(rank, ranks, first), location, by_files(rank, ranks, token));
}

void save_all(const Location& location, int64_t first, const std::string& token = kFirst) {
  for (const int rank : {0, 1}) save_rank(location, rank, 2, first, token);
}

std::string id_of(const std::string& token) { return engine::save_id_of(token, 0); }

Value common_of(int64_t first) {
  return Value::dict({{"p", Value(counting(DType::kInt64, {3}, first))}, {"step", first}});
}

// 0: no checkpoint; else the first value of its state. Expects a complete checkpoint, also by
// Megatron-Core's criteria: metadata.json, common.pt and .metadata.
int64_t saved_value(const std::shared_ptr<Storage>& storage) {
  const bool switched = storage->stat("metadata.json").has_value();
  try {
    const Checkpoint checkpoint = Checkpoint::open(Location(storage));
    EXPECT_TRUE(switched);
    EXPECT_EQ(checkpoint.dialect().name(), "megatron");
    EXPECT_TRUE(checkpoint.verify().ok());
    const int64_t first = step_of(checkpoint).as_int();
    expect_rows(Location(storage), first, 2);
    const Bytes common = read_file(*storage, "common.pt", UINT64_MAX);
    EXPECT_EQ(read_torch_archive(common), common_of(first));
    EXPECT_EQ(checkpoint.read_object("extra/shard_0_1"), Value("x"));
    return first;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    EXPECT_FALSE(switched) << error.what();
    return 0;
  }
}

// The last rank's process dies just before it gives a file its name, or just after.
std::shared_ptr<Storage> dead_at(const std::string& file, bool after = false) {
  const auto inner = memory_storage();
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (call.op != StorageOp::kRename || call.to != file) return FaultAction::pass();
    return after ? FaultAction::die_after() : FaultAction::die();
  });
  save_rank(Location(inner), 0, 2, 3);
  EXPECT_THROW(save_rank(Location(disk->storage(1)), 1, 2, 3), Error);
  return inner;
}

std::vector<std::string> top_of(Storage& storage) {
  std::vector<std::string> names = storage.list_files();
  std::erase_if(names, [](const std::string& name) { return name.ends_with(".distcp"); });
  return names;
}

TEST(SaveByFilesMegatron, TheLastRankLeavesTheFilesOfEveryVersionAndNothingElse) {
  std::vector<FileImage> images;
  for (const bool later : {false, true}) {
    const auto storage = memory_storage();
    const int order[] = {later ? 2 : 0, 1, later ? 0 : 2};
    for (const int rank : order) {
      EXPECT_EQ(save_rank(Location(storage), rank, 3, 5).published, rank == order[2]);
    }
    EXPECT_THAT(top_of(*storage), ElementsAre(".metadata", "common.pt", "metadata.json"));
    EXPECT_TRUE(find_unpublished(Location(storage)).empty());
    EXPECT_TRUE(find_leftovers(Location(storage)).empty());
    const Checkpoint checkpoint = Checkpoint::open(Location(storage));
    EXPECT_THAT(checkpoint.keys(), ElementsAre("extra/shard_0_1", "rng/shard_0_3", "rng/shard_1_3",
                                               "rng/shard_2_3", "w"));
    EXPECT_TRUE(checkpoint.metadata().copies.empty());
    EXPECT_TRUE(checkpoint.verify().ok());
    EXPECT_EQ(checkpoint.common(), common_of(5));
    images.push_back(memory_image(*storage));
  }
  for (const char* name : {".metadata", "common.pt", "metadata.json"}) {
    EXPECT_EQ(images[0].at(name), images[1].at(name)) << name;
  }
}

TEST(SaveByFilesMegatron, AClaimWhosePublisherDiesIsUnpublishedAndAnybodyCompletesIt) {
  for (const auto& [file, after] : {std::pair{".metadata", true},
                                    {"common.pt", false},
                                    {"common.pt", true},
                                    {"metadata.json", false}}) {
    SCOPED_TRACE(std::string(file) + (after ? " after" : " before"));
    const auto storage = dead_at(file, after);
    const Location location(storage);
    EXPECT_TRUE(storage->stat(".metadata"));
    EXPECT_EQ(saved_value(storage), 0);
    expect_error([&] { Checkpoint::open(location); }, ErrorCode::kNotFound,
                 "`tilestone publish` makes it the checkpoint");
    const auto names = storage->list();
    expect_error([&] { save_rank(location, 0, 2, 4, kSecond); }, ErrorCode::kAlreadyExists,
                 "is being published");
    SaveOptions pytorch = by_files(0, 2, kSecond);
    pytorch.dialect = pytorch_dialect();
    expect_error([&] { save(state_of(0, 2, 4), location, pytorch); }, ErrorCode::kAlreadyExists,
                 "is being published");
    for (const bool overwrite : {false, true}) {
      SaveOptions with_comm;
      with_comm.overwrite = overwrite;
      expect_error([&] { save(state_of(0, 1, 4), location, with_comm); }, ErrorCode::kAlreadyExists,
                   "not published yet");
    }
    expect_error([&] { abandon(location, {.period = 0}); }, ErrorCode::kUnsupported,
                 "have written");
    EXPECT_THAT(remove_leftovers(location), IsEmpty());
    EXPECT_EQ(storage->list(), names);
    ASSERT_EQ(find_unpublished(location).size(), 1u);
    EXPECT_TRUE(find_unpublished(location).front().complete());
    EXPECT_EQ(publish(location), id_of(kFirst));
    EXPECT_EQ(saved_value(storage), 3);
    EXPECT_TRUE(find_unpublished(location).empty());
    EXPECT_TRUE(find_leftovers(location).empty());
  }
}

TEST(SaveByFilesMegatron, TheSecondOfTwoRunsChangesNothingAndItsFilesAreLeftovers) {
  const auto inner = memory_storage();
  const Location location(inner);
  bool dies = false;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    return dies && call.to == "common.pt" ? FaultAction::die() : FaultAction::pass();
  });
  save_rank(location, 0, 2, 4, kSecond);
  save_rank(location, 0, 2, 3, kFirst);
  dies = true;
  EXPECT_THROW(save_rank(Location(disk->storage(1)), 1, 2, 3, kFirst), Error);
  const std::string first = id_of(kFirst);
  expect_error([&] { save_rank(location, 1, 2, 4, kSecond); }, ErrorCode::kAlreadyExists, first);
  expect_error([&] { publish(location, {.save_id = id_of(kSecond)}); }, ErrorCode::kAlreadyExists,
               "`tilestone publish` completes that save");
  EXPECT_THAT(top_of(*inner), ElementsAre(".metadata"));
  EXPECT_EQ(saved_value(inner), 0);
  EXPECT_EQ(publish(location, {.save_id = first}), first);
  EXPECT_EQ(saved_value(inner), 3);
  EXPECT_FALSE(remove_leftovers(location).empty());
  for (const std::string& name : inner->list()) {
    if (name == engine::outcome_name(id_of(kSecond))) continue;
    EXPECT_EQ(name.find(id_of(kSecond)), std::string::npos) << name;
  }
  EXPECT_TRUE(find_unpublished(location).empty());
  EXPECT_EQ(saved_value(inner), 3);
}

TEST(SaveByFilesMegatron, WhoComesAfterAnotherRunWasPublishedIsNotToldToMoveItsFiles) {
  const Location location(memory_storage());
  save_rank(location, 0, 2, 4, kSecond);
  for (const int rank : {0, 1}) save_rank(location, rank, 2, 3, kFirst);
  const Error error = error_of([&] { save_rank(location, 1, 2, 4, kSecond); });
  EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists) << error.what();
  EXPECT_THAT(error.message(), testing::HasSubstr("another checkpoint was published"));
  EXPECT_EQ(error.hint(), "");
}

// At each call of the process that publishes one run, another run happens completely.
TEST(SaveByFilesMegatron, OfTwoRunsThatPublishAtAnyMomentOneIsPublished) {
  set_log_level(LogLevel::kError);
  int seconds = 0;
  bool reached = true;
  for (uint64_t at = 0; reached; at += kStride) {
    SCOPED_TRACE("call " + std::to_string(at));
    const auto inner = memory_storage();
    for (const char* token : {kFirst, kSecond}) {
      save_rank(Location(inner), 0, 2, token == kFirst ? 3 : 4, token);
    }
    std::atomic<uint64_t> calls = 0;  // a lease's thread calls too
    const auto disk = FaultDisk::create(inner, [&](const StorageCall&) {
      if (calls++ != at) return FaultAction::pass();
      try {
        save_rank(Location(inner), 1, 2, 4, kSecond);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists) << error.what();
      }
      return FaultAction::pass();
    });
    try {
      save_rank(Location(disk->storage(1)), 1, 2, 3, kFirst);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists) << error.what();
    }
    reached = calls > at;
    const int64_t stands = saved_value(inner);
    EXPECT_TRUE(stands == 3 || (reached && stands == 4)) << stands;
    seconds += stands == 4 ? 1 : 0;
    remove_leftovers(Location(inner));
    EXPECT_EQ(saved_value(inner), stands);
    if (HasFailure()) break;
  }
  EXPECT_GT(seconds, kReduced ? 3 : 10);
  set_log_level(LogLevel::kWarning);
}

TEST(SaveByFilesMegatron, TwoPublishersOfOneRunMakeItTogetherAtAnyMoment) {
  bool reached = true;
  for (uint64_t at = 0; reached; at += kStride) {
    SCOPED_TRACE("call " + std::to_string(at));
    const auto inner = memory_storage();
    save_rank(Location(inner), 0, 2, 3);
    std::atomic<uint64_t> calls = 0;  // a lease's thread calls too
    const auto disk = FaultDisk::create(inner, [&](const StorageCall&) {
      if (calls++ == at) save_rank(Location(inner), 1, 2, 3);
      return FaultAction::pass();
    });
    EXPECT_TRUE(save_rank(Location(disk->storage(1)), 1, 2, 3).published);
    reached = calls > at;
    EXPECT_EQ(saved_value(inner), 3);
    EXPECT_TRUE(find_unpublished(Location(inner)).empty());
    if (HasFailure()) return;
  }
}

// In a directory that can be replaced as a whole. With `completed`, a second process of the last
// rank comes first, and completes the save if rank 0 has written.
void expect_all_or_nothing_of_both(uint64_t at, bool completed, bool& reached, int& replaced) {
  const auto root = memory_storage();
  const auto inner = root->child("checkpoint");
  std::atomic<uint64_t> calls = 0;  // a lease's thread calls too
  bool refused = true;
  const auto disk = FaultDisk::create(root, [&](const StorageCall&) {
    if (calls++ != at) return FaultAction::pass();
    if (completed) save_rank(Location(inner), 1, 2, 3);
    SaveOptions options;
    options.dialect = megatron_dialect();
    options.overwrite = true;
    options.resources.threads = 1;
    StateDict state = state_of(0, 1, 9);
    state["w"] = ShardedTensor::from_rank_offsets("w", counting(DType::kFloat32, {2, 8}, 9), {});
    try {
      save(state, Location(inner), options);
      refused = false;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists) << error.what();
    }
    return FaultAction::pass();
  });
  for (const int rank : {0, 1}) {
    try {
      save_rank(Location(disk->storage(rank)->child("checkpoint")), rank, 2, 3);
    } catch (const Error& error) {
      // It finds the other run's file, or its own temporary file is gone with the directory.
      EXPECT_FALSE(refused) << error.what();
    }
  }
  reached = calls > at;
  replaced += refused ? 0 : 1;
  EXPECT_EQ(saved_value(inner), refused ? 3 : 9);
  remove_leftovers(Location(inner));
  EXPECT_EQ(saved_value(inner), refused ? 3 : 9);
}

TEST(SaveByFilesMegatron, ASaveWithACommunicatorAtAnyMomentRefusesOrReplacesAllOfIt) {
  set_log_level(LogLevel::kError);
  for (const bool completed : {false, true}) {
    int replaced = 0;
    bool reached = true;
    for (uint64_t at = 0; reached && !HasFailure(); at += completed ? 5 * kStride : kStride) {
      SCOPED_TRACE("call " + std::to_string(at) + (completed ? ", after a twin" : ""));
      expect_all_or_nothing_of_both(at, completed, reached, replaced);
    }
    EXPECT_GT(replaced, kReduced ? 1 : 5);
  }
  set_log_level(LogLevel::kWarning);
}

// The caller may change them in the meantime.
TEST(SaveByFilesMegatron, TensorsOfTheCommonStateAreSavedAsTheyWereWhenTheyWereStaged) {
  const auto storage = memory_storage();
  StateDict state;
  const TensorView tensor = counting(DType::kInt64, {3}, 3);
  state["p"] = tensor;
  SteppedSave staged = begin_save(state, Location(storage), by_files(0, 1)).stage();
  std::fill_n(tensor.data, tensor.bytes(), std::byte{9});
  EXPECT_TRUE(staged.write().report().publish().published);
  const Value wanted = Value::dict({{"p", Value(counting(DType::kInt64, {3}, 3))}});
  EXPECT_EQ(read_torch_archive(read_file(*storage, "common.pt", UINT64_MAX)), wanted);
  EXPECT_EQ(Checkpoint::open(Location(storage)).common(), wanted);
  EXPECT_TRUE(Checkpoint::open(Location(storage)).verify().ok());
}

// The save with a communicator takes the lock after the first rank has looked for it, and has not
// looked for attempts yet.
TEST(SaveByFilesMegatron, ASaveWithACommunicatorThatBeginsAtTheSameTimeIsSeen) {
  const auto inner = memory_storage();
  std::unique_ptr<StorageClaim> lock;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (call.op == StorageOp::kRename && call.to == engine::attempt_name(id_of(kFirst))) {
      lock = inner->claim(std::string(engine::kLockName));
    }
    return FaultAction::pass();
  });
  expect_error([&] { save_rank(Location(disk->storage(0)), 0, 2, 3); }, ErrorCode::kAlreadyExists,
               "a save with a communicator is under way");
  lock.reset();
  EXPECT_TRUE(engine::read_failed(*inner, id_of(kFirst)));
  for (const int rank : {0, 1}) save_rank(Location(inner), rank, 2, 3, kSecond);
  EXPECT_EQ(saved_value(inner), 3);
}

TEST(SaveByFilesMegatron, NoDeadlineEndsTheCallOnceTheClaimExists) {
  const auto inner = memory_storage();
  bool claimed = false;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (call.op != StorageOp::kRename || call.to != ".metadata") return FaultAction::pass();
    claimed = true;
    return FaultAction::wait(std::chrono::milliseconds(1500));
  });
  save_rank(Location(inner), 0, 2, 3);
  SaveOptions options = by_files(1, 2);
  options.timeout = 1;
  EXPECT_TRUE(save(state_of(1, 2, 3), Location(disk->storage(1)), options).published);
  EXPECT_TRUE(claimed);
  EXPECT_EQ(saved_value(inner), 3);
}

TEST(SaveByFilesMegatron, AReaderAtAnyMomentFindsNoCheckpointOrTheWholeOne) {
  const auto inner = memory_storage();
  std::vector<int64_t> found;
  std::mutex mutex;  // a lease's thread calls too
  const auto disk = FaultDisk::create(inner, [&](const StorageCall&) {
    const std::lock_guard lock(mutex);
    if (found.empty() || found.back() == 0) found.push_back(saved_value(inner));
    return FaultAction::pass();
  });
  for (const int rank : {0, 1}) save_rank(Location(disk->storage(rank)), rank, 2, 3);
  EXPECT_EQ(found.back(), 3);
  EXPECT_GT(found.size(), 30u);
}

// The checkpoint is published at each call of a reader that has already begun.
TEST(SaveByFilesMegatron, AReaderThatStallsFindsNoCheckpointOrTheWholeOne) {
  for (const char* file : {".metadata", "common.pt", "metadata.json"}) {
    bool reached = true;
    for (uint64_t at = 0; reached; ++at) {
      SCOPED_TRACE(std::string(file) + ", call " + std::to_string(at));
      const auto inner = dead_at(file);
      std::atomic<uint64_t> calls = 0;  // a lease's thread calls too
      const auto disk = FaultDisk::create(inner, [&](const StorageCall&) {
        if (calls++ == at) publish(Location(inner));
        return FaultAction::pass();
      });
      try {
        EXPECT_EQ(step_of(Checkpoint::open(Location(disk->storage()))), Value(3));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
      }
      reached = calls > at;
      if (HasFailure()) return;
    }
  }
}

TEST(SaveByFilesMegatron, ExistingFilesOfItsNamesAreNamedBeforeAnythingIsMade) {
  // As an interrupted save of Megatron-Core leaves it.
  const auto storage = memory_storage({{"common.pt", to_bytes("mine")}});
  expect_error([&] { save_rank(Location(storage), 0, 2, 3); }, ErrorCode::kAlreadyExists,
               "common.pt");
  EXPECT_THAT(storage->list(), ElementsAre("common.pt"));
  const auto other = memory_storage({{"metadata.json", to_bytes("{\"mine\": 1}")}});
  expect_error([&] { save_rank(Location(other), 0, 2, 3); }, ErrorCode::kAlreadyExists,
               "a checkpoint exists");
  EXPECT_THAT(other->list(), ElementsAre("metadata.json"));
}

TEST(SaveByFilesMegatron, AFileOfItsNamesThatComesMeanwhileIsNamedAndStays) {
  for (const char* name : {"common.pt", "metadata.json"}) {
    for (const bool claimed : {false, true}) {
      SCOPED_TRACE(std::string(name) + (claimed ? ", after the claim" : ""));
      const auto inner = memory_storage();
      const auto put = [&] {
        inner->publish(name, "x.tmp", as_bytes("mine"), false, Deadline::never());
      };
      const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
        if (claimed && call.op == StorageOp::kRename && call.to == ".metadata") put();
        return FaultAction::pass();
      });
      save_rank(Location(inner), 0, 2, 3);
      if (!claimed) put();
      expect_error([&] { save_rank(Location(disk->storage(1)), 1, 2, 3); },
                   ErrorCode::kAlreadyExists, name);
      EXPECT_EQ(inner->stat(".metadata").has_value(), claimed);
      EXPECT_EQ(as_text(read_file(*inner, name, 100)), "mine");
      inner->remove(name);
      publish(Location(inner));
      EXPECT_EQ(saved_value(inner), 3);
    }
  }
}

TEST(SaveByFilesMegatron, ALaterSaveWithACommunicatorReplacesAllOfIt) {
  const auto root = memory_storage();
  const auto storage = root->child("checkpoint");
  save_all(Location(storage), 3);
  SaveOptions options;
  options.dialect = megatron_dialect();
  options.overwrite = true;
  save(state_of(0, 1, 9), Location(storage), options);
  for (const std::string& name : root->list()) {
    EXPECT_EQ(name.find(id_of(kFirst)), std::string::npos) << name;
  }
  EXPECT_EQ(step_of(Checkpoint::open(Location(storage))), Value(9));
  expect_error([&] { save_rank(Location(storage), 0, 2, 3); }, ErrorCode::kAlreadyExists,
               "a checkpoint");
}

TEST(SaveByFilesMegatron, WhatHasNoMainReplicaIsNamedWhenItIsPublished) {
  int lacking = -1;  // the rank that the error names, from 0
  const auto refused = [&](const std::function<void(StateDict&, int)>& change) {
    const auto storage = memory_storage();
    std::string said;
    lacking = -1;
    for (const int rank : {0, 1}) {
      StateDict state = state_of(rank, 2, 3);
      change(state, rank);
      try {
        save(state, Location(storage), by_files(rank, 2));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCoverage) << error.what();
        said = error.what();
        lacking = error.rank();
      }
    }
    EXPECT_EQ(saved_value(storage), 0);
    EXPECT_THAT(top_of(*storage), IsEmpty());
    return said;
  };
  EXPECT_THAT(refused([](StateDict& state, int rank) {
                state["lost"] = ShardedObject::make("lost", Value(1), {2}, {rank}, {1});
              }),
              HasSubstr("lost/shard_0_2"));
  EXPECT_EQ(lacking, 0);
  EXPECT_THAT(refused([](StateDict& state, int) {
                state["lost"] = ShardedTensor::from_rank_offsets(
                    "lost", counting(DType::kFloat32, {4}), {}, {0, 1});
              }),
              HasSubstr("key lost"));
}

TEST(SaveByFilesMegatron, DeclaredHoldersShareTheWritingAndOthersLeaveItToTheMainReplica) {
  const auto storage = memory_storage();
  std::vector<uint64_t> items;
  for (const int rank : {0, 1}) {
    StateDict state;
    for (const char* key : {"a", "b", "c", "d"}) {
      ShardedTensor tensor =
          ShardedTensor::from_rank_offsets(key, counting(DType::kFloat32, {4}), {}, {0, rank});
      if (key[0] < 'c') tensor.holders = {0, 1};
      state[key] = tensor;
    }
    items.push_back(save(state, Location(storage), by_files(rank, 2)).items_written);
  }
  EXPECT_THAT(items,
              ElementsAre(1 + 2 + 1, 1));  // one of "a" and "b"; then "c", "d" and the common state
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_THAT(checkpoint.keys(), ElementsAre("a", "b", "c", "d"));
  EXPECT_TRUE(checkpoint.metadata().copies.empty());
}

TEST(SaveByFilesMegatron, CommonStateThatDiffersIsSaidOrRefusedAndRank0sIsSaved) {
  const auto saved = [](Checks::Differing differing, bool compared, std::string& said) {
    const auto storage = memory_storage();
    set_log_sink([&](LogLevel, std::string_view text) { said.append(text); });
    for (const int rank : {1, 0}) {
      SaveOptions options = by_files(rank, 2);
      options.checks.common_differs = differing;
      StateDict state = state_of(rank, 2, 3);
      state["step"] = Value(int64_t{3 + rank});
      engine::SaveRequest request{std::move(state), Location(storage), options, {}};
      if (compared) request.compared_common = StateDict();
      try {
        save_in_a_row({request.location, options, Deadline::after(std::chrono::seconds(20))},
                      view_of(request));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
        said.append(error.what());
      }
    }
    set_log_sink({});
    return storage;
  };
  using Differing = Checks::Differing;
  const std::string what = "the common state of rank 1";
  std::string warned, refused, ignored, alike;
  EXPECT_EQ(step_of(Checkpoint::open(Location(saved(Differing::kWarn, false, warned)))), Value(3));
  EXPECT_THAT(warned, HasSubstr(what));
  EXPECT_FALSE(saved(Differing::kError, false, refused)->stat("metadata.json"));
  EXPECT_THAT(refused, HasSubstr(what));
  EXPECT_TRUE(saved(Differing::kIgnore, false, ignored)->stat("metadata.json"));
  EXPECT_EQ(ignored, "");
  EXPECT_TRUE(saved(Differing::kError, true, alike)->stat("metadata.json"));
  EXPECT_EQ(alike, "");
}

TEST(SaveByFilesMegatron, WhatNoFilesCanCoordinateIsRefusedWithTheReason) {
  const auto storage = memory_storage();
  const auto refused = [&](const std::function<void(SaveOptions&)>& change,
                           const std::string& text) {
    SaveOptions options = by_files(0, 1);
    change(options);
    expect_error([&] { save(state_of(0, 1, 3), Location(storage), options); },
                 ErrorCode::kUnsupported, text);
  };
  refused([](SaveOptions& o) { o.format = format_named("zarr"); }, "data files have fixed names");
  refused([](SaveOptions& o) { o.dialect = megatron_shards_dialect(); }, "another program writes");
  refused([](SaveOptions& o) { o.by_files->torch_rank_local = true; }, "rank-local mode");
  refused([](SaveOptions& o) { o.checks.access = true; }, "checks.access");
  EXPECT_THAT(storage->list(), IsEmpty());
}

// A receipt that Tilestone itself never writes.
TEST(SaveByFilesMegatron, AReceiptOfRank0WithoutTheDialectsFilesIsRefused) {
  const auto storage = memory_storage();
  save_rank(Location(storage), 0, 2, 3);
  const engine::AttemptHead head = *engine::read_head(*storage, id_of(kFirst));
  const std::string name = engine::attempt_receipt_name(head, 0);
  const auto left = engine::AttemptReceipt::decode(read_file(*storage, name, UINT64_MAX), name);
  ASSERT_EQ(left.of_dialect.size(), 2u);
  const auto refused = [&](const std::function<void(Index&)>& change) {
    engine::AttemptReceipt changed = left;
    change(changed.of_dialect);
    storage->publish(name, "x.tmp", changed.encode(), true, Deadline::never());
    FileImage before = memory_image(*storage);
    expect_error([&] { save_rank(Location(memory_storage(before)), 1, 2, 3); }, ErrorCode::kCorrupt,
                 "index files of the dialect megatron");
  };
  refused([](Index& index) { index.clear(); });
  refused([](Index& index) { index[0].name = "../common.pt"; });
}

}  // namespace tilestone::save_by_files_megatron_test
