#include "tilestone/engine/commit/removal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::removal_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kFirst = 7;  // the tensors' first element

ShardedTensor whole(const std::string& key) {
  return ShardedTensor::from_rank_offsets(key, counting(DType::kInt32, {40}, kFirst), {});
}

// Rank 0 has "keep", "drop.a" and an object "drop.o". Rank 1 has only "drop.b", so nothing of its
// file remains.
StateDict state_of(const Communicator& comm) {
  StateDict state;
  state["step"] = 3;
  if (comm.rank() == 0) {
    state["a"] = whole("drop.a");
    state["k"] = whole("keep");
    state["o"] = ShardedObject::make("drop.o", Value("mine"), {1}, {0});
    state["p"] = ShardedObject::make("keep.o", Value("yours"), {1}, {0});
  } else {
    state["b"] = whole("drop.b");
  }
  return state;
}

void save_to(const std::shared_ptr<Storage>& storage, bool overwrite = false,
             const std::shared_ptr<const Dialect>& dialect = megatron_dialect()) {
  run_ranks(2, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    options.dialect = dialect;
    options.overwrite = overwrite;
    options.resources.buffer_bytes = 1u << 20;
    options.attributes = {{"iteration", "5"}};
    if (comm.rank() == 0) {
      options.tensor_attributes = {{"keep", {{"scale", 2}}}, {"drop.a", {{"scale", 3}}}};
    }
    save(state_of(comm), Location(storage), options);
  });
}

FileImage saved() {
  const auto storage = memory_storage();
  save_to(storage);
  return memory_image(*storage);
}

FileImage of_another_writer() { return as_of_another_writer(saved()); }

std::vector<std::string> keys_at(const std::shared_ptr<Storage>& storage) {
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  const VerifyReport report = checkpoint.verify();
  EXPECT_TRUE(report.ok()) << report.damages.front().file << ": " << report.damages.front().problem;
  EXPECT_EQ(elements(checkpoint.read("keep")), elements(counting(DType::kInt32, {40}, kFirst)));
  EXPECT_EQ(checkpoint.read_object("keep.o/shard_0_1"), Value("yours"));
  EXPECT_EQ(checkpoint.common(), Value::dict({{"step", 3}}));
  return checkpoint.keys();
}

size_t data_files(Storage& storage) {
  size_t found = 0;
  for (const std::string& name : storage.list()) found += name.ends_with(".distcp") ? 1 : 0;
  return found;
}

const std::vector<std::string> kAll = {"drop.a", "drop.b", "drop.o/shard_0_1", "keep",
                                       "keep.o/shard_0_1"};
const std::vector<std::string> kKept = {"keep", "keep.o/shard_0_1"};

TEST(RemoveKeys, TakesTensorsAndObjectsAndTheFilesOfWhichNothingIsLeft) {
  const auto storage = memory_storage(saved());
  ASSERT_EQ(keys_at(storage), kAll);
  ASSERT_EQ(data_files(*storage), 2u);
  const Removal removal = remove_keys(Location(storage), "drop.");
  EXPECT_THAT(removal.keys, ElementsAre("drop.a", "drop.b", "drop.o/shard_0_1"));
  EXPECT_THAT(removal.files, ElementsAre(HasSubstr("__1_0.distcp")));
  EXPECT_GT(removal.bytes, 160u);
  EXPECT_EQ(keys_at(storage), kKept);
  EXPECT_EQ(data_files(*storage), 1u);
  const auto record = Checkpoint::open(Location(storage)).save_record();
  ASSERT_TRUE(record.has_value());
  EXPECT_EQ(record->world_size, 2);
  EXPECT_EQ(record->attributes.at("iteration"), "5");
  const auto attributes = Checkpoint::open(Location(storage)).metadata().attributes;
  ASSERT_EQ(attributes.size(), 1u);
  EXPECT_EQ(attributes.at("keep"), (Attributes{{"scale", 2}}));
  EXPECT_THAT(find_leftovers(Location(storage)), IsEmpty());
}

TEST(RemoveKeys, WhereNoKeyBeginsSoNothingChanges) {
  FileImage image = saved();
  image.erase(".tilestone/lock");
  const auto storage = memory_storage(image);
  EXPECT_THAT(remove_keys(Location(storage), "common").keys, IsEmpty());  // it is not removed
  EXPECT_THAT(remove_keys(Location(storage), "rop.").keys, IsEmpty());
  EXPECT_EQ(memory_image(*storage), image);
}

TEST(RemoveKeys, AllKeysMayGo) {
  const auto storage = memory_storage(saved());
  EXPECT_EQ(remove_keys(Location(storage), "drop.").keys.size(), 3u);
  EXPECT_EQ(remove_keys(Location(storage), "keep").keys.size(), 2u);
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_THAT(checkpoint.keys(), IsEmpty());
  EXPECT_EQ(checkpoint.common(), Value::dict({{"step", 3}}));
  EXPECT_TRUE(checkpoint.verify().ok());
}

TEST(RemoveKeys, TheNextSaveLeavesNothingOfTheOldFiles) {
  const auto parent =
      memory_storage();  // a save that replaces another one makes a directory beside it
  const auto storage = parent->child("ckpt");
  save_to(storage);
  remove_keys(Location(storage), "drop.");
  remove_keys(Location(storage), "keep.");
  save_to(storage, true);
  EXPECT_EQ(keys_at(storage), kAll);
  EXPECT_EQ(data_files(*storage), 2u);
  EXPECT_THAT(find_leftovers(Location(storage)), IsEmpty());
}

TEST(RemoveKeys, OfAnotherWritersCheckpointToo) {
  FileImage image = of_another_writer();
  ASSERT_EQ(keys_at(memory_storage(image)), kAll);
  image["integrity.json"] = to_bytes("{}");
  image["notes.txt"] = to_bytes("mine");
  const auto storage = memory_storage(image);
  EXPECT_THAT(remove_keys(Location(storage), "drop.").files, ElementsAre("__1_0.distcp"));
  EXPECT_EQ(keys_at(storage), kKept);
  const FileImage after = memory_image(*storage);
  EXPECT_FALSE(after.contains("integrity.json"));
  EXPECT_TRUE(after.contains("notes.txt"));
  EXPECT_EQ(after.at("__0_0.distcp"), image.at("__0_0.distcp"));
}

TEST(RemoveKeys, RefusesWhatItCantKeep) {
  const auto refused = [](const FileImage& image, ErrorCode code, const std::string& text) {
    const auto storage = memory_storage(image);
    expect_error([&] { remove_keys(Location(storage), "drop."); }, code, text);
    EXPECT_EQ(memory_image(*storage), image);
  };
  const auto storage = memory_storage();
  save_to(storage, false, pytorch_dialect());
  refused(memory_image(*storage), ErrorCode::kUnsupported, "the dialect pytorch");
  refused({}, ErrorCode::kNotFound, "no checkpoint");
  FileImage lost = saved();
  std::erase_if(lost, [](const auto& file) { return file.first.ends_with(".manifest"); });
  refused(lost, ErrorCode::kCorrupt, "manifest");
  expect_error([&] { remove_keys(Location(storage), ""); }, ErrorCode::kInvalidArgument,
               "an empty prefix");
}

TEST(RemoveKeys, WaitsForWhoeverHoldsTheLockAndSeesWhatHeDid) {
  const auto storage = memory_storage(saved());
  auto lock = storage->claim(std::string(engine::kLockName));
  ASSERT_NE(lock, nullptr);
  RemovalOptions options;
  options.timeout = 0;
  expect_error([&] { remove_keys(Location(storage), "drop.", options); }, ErrorCode::kAlreadyExists,
               "is under way");
  lock.reset();
  std::vector<Removal> found(4);
  {
    std::vector<std::jthread> callers;
    for (Removal& removal : found) {
      callers.emplace_back([&] { removal = remove_keys(Location(storage), "drop."); });
    }
  }
  size_t removed = 0;
  for (const Removal& removal : found) removed += removal.keys.size();
  EXPECT_EQ(removed, 3u);
  EXPECT_EQ(keys_at(storage), kKept);
}

TEST(RemoveKeys, AReaderOfTheOldCheckpointGetsItsDataOrAnErrorThatItWasReplaced) {
  for (const FileImage& before : {saved(), of_another_writer()}) {
    const auto inner = memory_storage(before);
    const Checkpoint old = Checkpoint::open(Location(inner));
    size_t read = 0, told = 0;
    const auto read_old = [&] {
      try {
        old.read("drop.b");
        ++read;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("another save"));
        ++told;
      }
    };
    const auto disk = FaultDisk::create(inner, [&](const StorageCall&) {
      read_old();
      return FaultAction::pass();
    });
    remove_keys(Location(disk->storage()), "drop.");
    read_old();
    EXPECT_GT(read, 0u);
    EXPECT_GT(told, 0u);
  }
}

TEST(RemoveKeys, AFailureBeforeTheSwitchLeavesNothing) {
  const FileImage before = saved();
  const auto inner = memory_storage(before);
  const auto disk = FaultDisk::create(inner, [](const StorageCall& call) {
    const bool hit = call.op == StorageOp::kCreate && call.name.ends_with("manifest.tmp");
    return hit ? FaultAction::fail(ENOSPC) : FaultAction::pass();
  });
  expect_error([&] { remove_keys(Location(disk->storage()), "drop."); }, ErrorCode::kIo);
  EXPECT_EQ(memory_image(*inner), before);
}

}  // namespace tilestone::removal_test
