// The engine reads, verifies and overwrites the checkpoints of stock PyTorch and Megatron-Core in
// tests/golden.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/golden.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::golden_read_test {

namespace fs = std::filesystem;
using Json = nlohmann::json;

uint32_t sum_of(const TensorView& tensor) { return crc32(elements(tensor)); }

void expect_golden(const fs::path& folder, const Location& location, uint64_t buffer_bytes) {
  OpenOptions options;
  options.resources.threads = 1;
  options.resources.buffer_bytes = buffer_bytes;
  const Checkpoint checkpoint = Checkpoint::open(location, options);
  const Json expected = Json::parse(std::ifstream(folder.string() + ".expected.json"));
  size_t tensors = 0;
  for (const auto& [key, tensor] : expected["tensors"].items()) {
    SCOPED_TRACE(key);
    const TensorView whole = checkpoint.read(key);
    EXPECT_EQ(sum_of(whole), tensor["crc32"].get<uint32_t>());
    EXPECT_EQ(to_string(whole.dtype), tensor["dtype"].get<std::string>());
    EXPECT_EQ(whole.shape, Dims(tensor["shape"].get<std::vector<int64_t>>()));
    Box part = Box::whole(whole.shape);
    for (size_t d = 0; d < part.rank(); ++d) {
      part.offset[d] = part.shape[d] / 3;
      part.shape[d] = (part.shape[d] + 1) / 2;
    }
    EXPECT_EQ(elements(checkpoint.read(key, part)), elements(whole.narrow(part)));
    ++tensors;
  }
  EXPECT_GT(tensors, 3u);
  for (const StoredObject& object : checkpoint.metadata().objects) {
    EXPECT_NO_THROW(checkpoint.read_object(object.key)) << object.key;
  }
}

void expect_text(const std::string& key, const Value& found, const Json& expected) {
  EXPECT_EQ(golden_text(found), without_enum_members(expected.get<std::string>())) << key;
}

// Compares Megatron-Core's objects, common state and content metadata.
TEST(Golden, MegatronsObjectsAndCommonStateAreWhatTheirWriterSays) {
  size_t checkpoints = 0;
  for (const fs::path& folder : goldens()) {
    if (!fs::exists(folder / "metadata.json")) continue;
    SCOPED_TRACE(folder.string());
    const Checkpoint checkpoint = Checkpoint::open(Location(folder));
    EXPECT_EQ(checkpoint.dialect().name(), "megatron");
    const Json expected = Json::parse(std::ifstream(folder.string() + ".expected.json"));
    for (const auto& [key, value] : expected["objects"].items()) {
      expect_text(key, checkpoint.read_object(key), value);
    }
    EXPECT_EQ(checkpoint.metadata().objects.size(), expected["objects"].size());
    std::optional<Value> common = checkpoint.common();
    ASSERT_TRUE(common);
    size_t keys = expected["common"].size();
    for (const auto& [key, value] : expected["common"].items()) {
      const Value* found = common->find(key);
      ASSERT_NE(found, nullptr) << key;
      expect_text(key, *found, value);
    }
    if (expected.contains("content_metadata")) {
      expect_text("content_metadata", *common->find("content_metadata"),
                  expected["content_metadata"]);
      ++keys;
    }
    EXPECT_EQ(common->as_dict().size(), keys);
    ++checkpoints;
  }
  EXPECT_GT(checkpoints, 30u);
}

TEST(Golden, EveryTensorIsWhatItsWriterSays) {
  for (const fs::path& folder : goldens()) {
    SCOPED_TRACE(folder.string());
    expect_golden(folder, Location(folder), 1u << 20);
    expect_golden(folder, Location(memory_storage(image_of(folder))), 128u << 10);
  }
}

// A template of every tensor: each rank wants the whole tensor, and a slab of its last dim.
StateDict wanted_of(const Metadata& metadata, const Communicator& comm) {
  StateDict wanted;
  for (const StoredTensor& tensor : metadata.tensors) {
    Box slab = Box::whole(tensor.shape);
    if (!tensor.shape.empty()) {
      const size_t d = tensor.shape.size() - 1;
      slab.offset[d] = tensor.shape[d] * comm.rank() / comm.size();
      slab.shape[d] = tensor.shape[d] * (comm.rank() + 1) / comm.size() - slab.offset[d];
    }
    for (const Box& box : {Box::whole(tensor.shape), slab}) {
      wanted[std::to_string(wanted.size())] = ShardedTensor::from_box(
          tensor.key, TensorView::without_data(tensor.dtype, box.shape), tensor.shape, box);
    }
  }
  return wanted;
}

TEST(Golden, EveryTensorIsTheSameWhenRanksReadForOneAnother) {
  for (const fs::path& folder : goldens()) {
    SCOPED_TRACE(folder.string());
    const Location location(memory_storage(image_of(folder)));
    const Checkpoint checkpoint = Checkpoint::open(location);
    run_ranks(3, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      options.resources.threads = 1;
      options.resources.buffer_bytes = 1u << 20;
      options.reading.two_phase = Reading::TwoPhase::kAlways;
      const StateDict loaded = load(wanted_of(checkpoint.metadata(), comm), location, options);
      for (const auto& [name, node] : loaded.entries()) {
        const auto* tensor = node.get_if<ShardedTensor>();
        if (tensor == nullptr) continue;  // a value of the common state
        EXPECT_EQ(elements(tensor->data), elements(checkpoint.read(tensor->key, tensor->box)))
            << tensor->key << " " << to_string(tensor->box);
      }
    });
  }
}

TEST(Golden, EveryCheckpointVerifies) {
  for (const fs::path& folder : goldens()) {
    const VerifyReport report = Checkpoint::open(Location(folder)).verify();
    EXPECT_TRUE(report.ok()) << folder << ": " << report.damages.front().file << " "
                             << report.damages.front().problem;
    EXPECT_GT(report.items, 3u);
  }
}

constexpr uint64_t kStride = kSanitized ? 3 : 1;  // between the calls at which a process crashes

void save_over(const Communicator& comm, const std::shared_ptr<Storage>& storage) {
  SaveOptions options;
  options.comm = comm;
  options.overwrite = true;
  options.resources.buffer_bytes = 1u << 20;
  save(row_state(comm, 1), Location(storage), options);
}

// Expects either the whole golden checkpoint or the whole new one.
void expect_one_or_the_other(const fs::path& folder, const Location& location) {
  if (Checkpoint::open(location).metadata().find_object("step") != nullptr &&
      Checkpoint::open(location).metadata().find_tensor("w") != nullptr) {
    expect_rows(location, 1, 2);
  } else {
    expect_golden(folder, location, 1u << 20);
  }
}

void overwrite_with_crashes(const fs::path& folder) {
  const LogLevel before = set_log_level(LogLevel::kOff);
  const FileImage image = image_of(folder);
  crash_everywhere(
      [&](const FaultHook& hook) {
        auto disk = FaultDisk::create(memory_storage(image), hook);
        run_ranks_collect(2,
                          [&](Communicator comm) { save_over(comm, disk->storage(comm.rank())); });
        return disk;
      },
      [&](const FileImage& left, uint64_t) {
        const auto storage = memory_storage(left);
        expect_one_or_the_other(folder, Location(storage));
        run_ranks(2, [&](Communicator comm) { save_over(comm, storage); });
        expect_rows(Location(storage), 1, 2);
      },
      kStride);
  set_log_level(before);
}

TEST(Golden, OverwritingAStockCheckpointLeavesItOrTheNewOne) {
  overwrite_with_crashes(golden("torch-2.14.1/dcp-w4"));
}

// The golden's files under "ckpt", so that a save can make files beside that directory.
std::shared_ptr<Storage> placed(const fs::path& folder) {
  FileImage image;
  for (auto& [name, bytes] : image_of(folder)) image.emplace("ckpt/" + name, std::move(bytes));
  return memory_storage(std::move(image));
}

// Megatron-Core reads common.pt and metadata.json together with .metadata or zarr arrays, so all of
// them must be of the same save.
TEST(Golden, OfMegatronIsReplacedAsAWholeOrNotAtAll) {
  int replaced = 0;
  for (const fs::path& folder : goldens()) {
    if (!fs::exists(folder / "metadata.json")) continue;
    SCOPED_TRACE(folder.string());
    const auto parent = placed(folder);
    const FileImage before = memory_image(*parent);
    SaveOptions options;
    const auto save_there = [&] { save(row_state(solo(), 1), parent->child("ckpt"), options); };
    expect_error(save_there, ErrorCode::kAlreadyExists, "metadata.json");
    EXPECT_EQ(memory_image(*parent), before);
    options.overwrite = true;
    for (const auto& format : {known_formats().front(), known_formats().back()}) {
      options.format = format;
      save_there();
      expect_rows(parent->child("ckpt"), 1, 1);
      for (const std::string& name : parent->list()) {
        EXPECT_TRUE(name.starts_with("ckpt/")) << name;
        EXPECT_FALSE(before.contains(name) && name != "ckpt/.metadata" &&
                     name != "ckpt/metadata.json")
            << name << " is of the old checkpoint";
      }
      const bool is_zarr = parent->stat("ckpt/metadata.json").has_value();
      EXPECT_EQ(is_zarr, format->name() == "zarr");
      EXPECT_NE(is_zarr, parent->stat("ckpt/.metadata").has_value());
      ++replaced;
    }
  }
  EXPECT_GT(replaced, 60);
}

TEST(Golden, OfMegatronIsNotReplacedWhereNoDirectoryCanBeMadeBesideIt) {
  for (const char* name : {"megatron-core-0.16.1/mc-w2", "megatron-core-0.13.1/zarr-w2"}) {
    const FileImage before = image_of(golden(name));
    const auto storage = memory_storage(before);
    SaveOptions options;
    options.overwrite = true;
    expect_error([&] { save(row_state(solo(), 1), storage, options); }, ErrorCode::kUnsupported,
                 "no directory can be made beside memory");
    EXPECT_EQ(memory_image(*storage), before);
  }
}

TEST(Golden, OverwritingARankLocalCheckpointLeavesItOrTheNewOne) {
  overwrite_with_crashes(golden("torch-2.14.1/dcp-w4-ranklocal"));
}

// Crashes at each call of a cleanup. The checkpoint that was found before is found afterwards.
TEST(Golden, CleaningAfterAnInterruptedReplacementKeepsTheNewCheckpoint) {
  const LogLevel before = set_log_level(LogLevel::kOff);
  const fs::path folder = golden("torch-2.14.1/dcp-w4-ranklocal");
  const auto dead = FaultDisk::create(memory_storage(image_of(folder)), [](const StorageCall& c) {
    const bool commit = c.op == StorageOp::kRename && c.to == ".metadata";
    return commit ? FaultAction::crash_after() : FaultAction::pass();
  });
  run_ranks_collect(2, [&](Communicator comm) { save_over(comm, dead->storage(comm.rank())); });
  const FileImage image = dead->surviving_image(Survival::kAll);
  ASSERT_GE(find_leftovers(Location(memory_storage(image))).size(), 5u);  // 4 ranks, the note
  crash_everywhere(
      [&](const FaultHook& hook) {
        auto disk = FaultDisk::create(memory_storage(image), hook);
        try {
          remove_leftovers(Location(disk->storage()));
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
        }
        return disk;
      },
      [](const FileImage& left, uint64_t) {
        const auto storage = memory_storage(left);
        expect_rows(Location(storage), 1, 2);
        remove_leftovers(Location(storage));
        EXPECT_TRUE(find_leftovers(Location(storage)).empty());
        expect_rows(Location(storage), 1, 2);
      },
      kStride);
  set_log_level(before);
}

TEST(Golden, OverwritingRemovesTheStockFiles) {
  for (const char* name : {"dcp-w4", "dcp-w4-ranklocal"}) {
    const FileImage before = image_of(golden("torch-2.14.1") / name);
    const auto storage = memory_storage(before);
    run_ranks(2, [&](Communicator comm) { save_over(comm, storage); });
    expect_rows(Location(storage), 1, 2);
    for (const auto& [file, bytes] : before) {
      if (file == ".metadata" || bytes.empty()) continue;  // replaced; not named by the metadata
      EXPECT_FALSE(storage->stat(file)) << file;
    }
    EXPECT_FALSE(storage->stat(".tilestone/replaced"));
  }
}

}  // namespace tilestone::golden_read_test
