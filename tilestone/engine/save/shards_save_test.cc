// Saves of the sharded part of a Megatron-Core checkpoint; Megatron-Core itself begins and ends the
// save.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/megatron_mark.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::shards_save_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kRanks = 2;

StateDict shards(const Communicator& comm, int64_t first) {
  StateDict state;
  state["model"] = StateDict();
  auto& model = *state["model"].get_if<StateDict>();
  model["w"] = *row_state(comm, first).find(std::string("w"));
  model["empty"] = StateDict();
  state["rng"] = ShardedObject::make("rng", Value(comm.rank()), {comm.size()}, {comm.rank()});
  return state;
}

SaveOptions options_of(const Communicator& comm) {
  SaveOptions options;
  options.comm = comm;
  options.dialect = megatron_shards_dialect();
  options.overwrite = true;
  options.resources.buffer_bytes = 1u << 20;
  return options;
}

void save_shards(const std::shared_ptr<Storage>& storage, int64_t first) {
  run_ranks(kRanks, [&](Communicator comm) {
    save(shards(comm, first), Location(storage), options_of(comm));
  });
}

void put_common(Storage& storage, int64_t step) {
  if (storage.stat("common.pt")) storage.remove("common.pt");
  put_file(storage, "common.pt", write_torch_archive(Value::dict({{"step", step}})));
}

void put_config(Storage& storage) {
  put_file(storage, "metadata.json", write_megatron_config("torch_dist", 1));
}

// Saves as Megatron-Core does with this dialect.
std::shared_ptr<Storage> saved(int64_t first) {
  const auto storage = memory_storage();
  put_common(*storage, first);
  save_shards(storage, first);
  put_config(*storage);
  return storage;
}

void expect_saved(const std::shared_ptr<Storage>& storage, int64_t first) {
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_EQ(checkpoint.dialect().name(), "megatron");
  EXPECT_EQ(checkpoint.common(), Value::dict({{"step", first}}));
  EXPECT_THAT(checkpoint.keys(), ElementsAre("rng/shard_0_2", "rng/shard_1_2", "w"));
  EXPECT_EQ(checkpoint.read_object("rng/shard_1_2"), Value(1));
  EXPECT_EQ(elements(checkpoint.read("w")),
            elements(counting(DType::kFloat32, {kRanks, 8}, first)));
  EXPECT_TRUE(checkpoint.verify().ok());
}

std::vector<std::string> data_files(Storage& storage) {
  std::vector<std::string> names = storage.list();
  std::erase_if(names, [](const std::string& name) { return !name.ends_with(".distcp"); });
  return names;
}

TEST(ShardsSave, ItsFilesBesideMegatronsOwnAreACheckpointOfBoth) {
  const auto storage = saved(1);
  expect_saved(storage, 1);
  // Stock PyTorch does not know dialects, and sees objects as lists.
  FileImage plain = memory_image(*storage);
  std::erase_if(plain, [](const auto& file) { return file.first.starts_with(".tilestone/"); });
  plain.erase("metadata.json");
  EXPECT_EQ(Checkpoint::open(Location(memory_storage(plain))).read_object("rng/shard_1_2"),
            Value::list({1}));
}

TEST(ShardsSave, IsNoCheckpointBeforeMegatronHasEndedIt) {
  const auto storage = memory_storage();
  put_common(*storage, 1);
  save_shards(storage, 1);
  expect_error([&] { Checkpoint::open(Location(storage)); }, ErrorCode::kCorrupt, "metadata.json");
  put_config(*storage);
  expect_saved(storage, 1);
}

TEST(ShardsSave, ReplacesOneInPlaceAndLeavesNoOldDataAndNoUsersFileOut) {
  const auto parent = memory_storage();
  const auto storage = parent->child("ckpt");
  parent->directories()->make("ckpt/mine");
  put_file(*parent, "ckpt/mine/.zarray", as_bytes("mine"));
  put_file(*parent, "ckpt/model.safetensors", as_bytes("mine"));
  put_file(*parent, "ckpt/__0_7.distcp", as_bytes("of a save that died"));
  put_common(*storage, 1);
  save_shards(storage, 1);
  EXPECT_EQ(data_files(*storage).size(), kRanks + 1u);
  put_config(*storage);
  storage->remove("metadata.json");
  put_common(*storage, 9);
  save_shards(storage, 9);
  put_config(*storage);
  expect_saved(storage, 9);
  EXPECT_EQ(data_files(*storage).size(), kRanks + 1u);
  EXPECT_TRUE(storage->stat("__0_7.distcp"));
  EXPECT_EQ(as_text(read_file(*storage, "mine/.zarray", 100)), "mine");
  EXPECT_TRUE(storage->stat("model.safetensors"));
  EXPECT_THAT(parent->list_directories(), ElementsAre("ckpt"));
  EXPECT_THAT(find_leftovers(Location(storage)), IsEmpty());
}

// Megatron-Core's own data files are those that its .metadata names.
TEST(ShardsSave, RemovesTheDataFilesThatAnotherWritersMetadataNames) {
  const auto storage = memory_storage();
  save(row_state(solo(), 1), Location(storage));
  FileImage image = memory_image(*storage);
  std::erase_if(image, [](const auto& file) { return file.first.starts_with(".tilestone/"); });
  const auto other = memory_storage(image);
  const std::vector<std::string> old = data_files(*other);
  ASSERT_EQ(old.size(), 1u);
  put_common(*other, 4);
  save_shards(other, 4);
  put_config(*other);
  expect_saved(other, 4);
  EXPECT_FALSE(other->stat(old[0]));
}

TEST(ShardsSave, OneThatFailsLeavesTheOldTensorsAndNoneOfItsOwn) {
  const auto storage = saved(1);
  storage->remove("metadata.json");
  const FileImage before = memory_image(*storage);
  const auto disk = FaultDisk::create(storage, [](const StorageCall& call) {
    const bool manifest = call.op == StorageOp::kRename && call.to.ends_with(".manifest");
    return manifest ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  for (const bool refused : {true, false}) {
    const auto said = failures(kRanks, [&](Communicator comm) {
      StateDict state = shards(comm, 5);
      if (refused && comm.rank() == 1) state["step"] = 3;
      save(state, Location(disk->storage()), options_of(comm));
    });
    for (const std::string& text : said)
      EXPECT_THAT(text, HasSubstr(refused ? "step" : "manifest"));
    FileImage after = disk->surviving_image(Survival::kAll);
    std::erase_if(after, [](const auto& file) { return file.first.ends_with(".begun"); });
    EXPECT_TRUE(after == before) << refused;
  }
}

TEST(ShardsSave, TakesTheCommonStateThatMegatronHandsOverAsAnObject) {
  const auto storage = memory_storage();
  run_ranks(kRanks, [&](Communicator comm) {
    StateDict state = shards(comm, 1);
    ShardedObject common =
        ShardedObject::make("common_state", Value::dict({{"step", comm.rank()}}), {1}, {0});
    common.replica_id = {comm.rank()};
    state["common_state"] = common;
    save(state, Location(storage), options_of(comm));
  });
  put_config(*storage);
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_EQ(checkpoint.common(), Value::dict({{"step", 0}}));
  EXPECT_THAT(checkpoint.keys(), ElementsAre("rng/shard_0_2", "rng/shard_1_2", "w"));
  StateDict state;
  state["x"] = ShardedObject::make("common_state", Value(1), {2}, {0});
  expect_error([&] { save(state, Location(storage), options_of(solo())); },
               ErrorCode::kInvalidArgument, "common state");
}

TEST(ShardsSave, RefusesOtherFormatsAndIsNoDialectOfADirectory) {
  SaveOptions options = options_of(solo());
  options.format = format_named("zarr");
  expect_error([&] { save(shards(solo(), 1), Location(memory_storage()), options); },
               ErrorCode::kUnsupported, "zarr");
  EXPECT_EQ(save_dialect_named("megatron_shards")->name(), "megatron_shards");
  EXPECT_EQ(save_dialect_named("pytorch")->name(), "pytorch");
  expect_error([] { dialect_named("megatron_shards"); }, ErrorCode::kUnsupported,
               "pytorch, megatron");
}

}  // namespace tilestone::shards_save_test
