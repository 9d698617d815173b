// Saves in the zarr format: what they refuse, and how damage is found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/geometry/strided_copy_testing.h"
#include "tilestone/state/device_memory_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::zarr_save_test {

using testing::HasSubstr;

SaveOptions zarr_options(const Communicator& comm, bool overwrite = false) {
  SaveOptions options;
  options.comm = comm;
  options.format = zarr_format();
  options.overwrite = overwrite;
  options.resources.buffer_bytes = 1u << 20;
  return options;
}

// The files of a zarr checkpoint that two ranks saved by rows.
FileImage saved() {
  const auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    save(row_state(comm, 1), Location(storage), zarr_options(comm));
  });
  FileImage image = memory_image(*storage);
  std::erase_if(image, [](const auto& file) { return file.first == ".tilestone/lock"; });
  return image;
}

TEST(ZarrSave, WritesTheFilesOfTheSpecAndIsRead) {
  const FileImage image = saved();
  std::set<std::string> names;
  for (const auto& [name, bytes] : image) {
    if (!name.starts_with(".tilestone/")) names.insert(name);
  }
  EXPECT_EQ(names, (std::set<std::string>{"metadata.json", "p/.zarray", "p/0", "step.pt",
                                          "w/.zarray", "w/0.0", "w/1.0"}));
  expect_rows(Location(memory_storage(image)), 1, 2);
  const VerifyReport report = Checkpoint::open(Location(memory_storage(image))).verify();
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.items_without_checksum, 0u);
}

TEST(ZarrSave, WithoutAManifestIsReadToo) {
  FileImage image = saved();
  std::erase_if(image, [](const auto& file) { return file.first.starts_with(".tilestone/"); });
  expect_rows(Location(memory_storage(image)), 1, 2);
  // Without a manifest it can't be distinguished from a Megatron-Core checkpoint that has lost its
  // common state.
  const VerifyReport report = Checkpoint::open(Location(memory_storage(image))).verify();
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].file, "common.pt");
}

// Whether opening or verify() finds damage.
bool is_found(const FileImage& image) {
  try {
    return !Checkpoint::open(Location(memory_storage(image))).verify().ok();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
    return true;
  }
}

TEST(ZarrSave, EveryFlippedByteAndEveryMissingFileIsFound) {
  const FileImage image = saved();
  for (const auto& [name, bytes] : image) {
    if (name.starts_with(".tilestone/")) continue;
    for (size_t at = 0; at < bytes.size(); at += bytes.size() / 7 + 1) {
      FileImage damaged = image;
      damaged[name][at] ^= std::byte{4};
      EXPECT_TRUE(is_found(damaged)) << name << " at " << at;
    }
    FileImage cut = image;
    cut[name].pop_back();
    EXPECT_TRUE(is_found(cut)) << name << " is cut";
    if (name == "metadata.json") continue;  // without this file there is no checkpoint
    FileImage lost = image;
    lost.erase(name);
    EXPECT_TRUE(is_found(lost)) << name << " is lost";
  }
}

TEST(ZarrSave, AFlippedByteIsFoundByALoad) {
  FileImage image = saved();
  image["w/1.0"][3] ^= std::byte{1};
  const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(image)));
  try {
    checkpoint.read("w");
    ADD_FAILURE() << "read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_EQ(error.key(), "w");
    EXPECT_EQ(error.file(), "w/1.0");
  }
}

TEST(ZarrSave, AMissingChunkOfAnotherWriterIsReportedByKey) {
  FileImage image = saved();
  std::erase_if(image, [](const auto& file) { return file.first.starts_with(".tilestone/"); });
  image.erase("w/1.0");
  EXPECT_TRUE(is_found(image));
  try {
    Checkpoint::open(Location(memory_storage(image))).read("w");
    ADD_FAILURE() << "read";
  } catch (const Error& error) {
    EXPECT_EQ(error.key(), "w") << error.what();
  }
}

// Rows of 300,000 bytes in buffers of 64 KiB; edge cells extend beyond the tensor in both dims.
TEST(ZarrSave, PadsEdgeCellsOfDeviceMemoryAndOfLargeTensors) {
  const Dims shape{3, 500'000};
  const Dims cell{2, 300'000};
  const TensorView whole = counting(DType::kUInt8, shape);
  const auto storage = memory_storage();
  run_ranks(4, [&](Communicator comm) {
    const int64_t row = comm.rank() / 2 * cell[0], column = comm.rank() % 2 * cell[1];
    const Box box{{row, column},
                  {std::min(cell[0], shape[0] - row), std::min(cell[1], shape[1] - column)}};
    TensorView part = whole.narrow(box);
    if (comm.rank() != 0) part = LateDevice::create()->put(part);
    StateDict state;
    state["w"] = ShardedTensor::from_box("w", part, shape, box);
    save(state, Location(storage), zarr_options(comm));
  });
  const FileImage image = memory_image(*storage);
  for (const char* name : {"w/0.0", "w/0.1", "w/1.0", "w/1.1"}) {
    EXPECT_EQ(image.at(name).size(), 600'000u) << name;
  }
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_EQ(elements(checkpoint.read("w")), elements(whole));
  EXPECT_TRUE(checkpoint.verify().ok());
}

// A reader would take existing files, there or in a subfolder, as part of the saved checkpoint.
// These locations have no parent in which a replacing directory could be made.
TEST(ZarrSave, NeedsADirectoryOfItsOwn) {
  const auto torch_dist = memory_storage();
  save(row_state(solo(), 1), Location(torch_dist));
  const FileImage others[] = {
      saved(), memory_image(*torch_dist), {{"README", Bytes(3)}}, {{"w/0.0", Bytes(3)}}};
  for (const FileImage& before : others) {
    for (const bool overwrite : {false, true}) {
      const auto storage = memory_storage(before);
      const auto save_there = [&] {
        save(row_state(solo(), 5), Location(storage), zarr_options(solo(), overwrite));
      };
      try {
        save_there();
        ADD_FAILURE() << "saved over " << before.begin()->first;
      } catch (const Error& error) {
        const bool stands = before.contains(".metadata") || before.contains("metadata.json");
        EXPECT_EQ(error.code(),
                  stands && !overwrite ? ErrorCode::kAlreadyExists : ErrorCode::kUnsupported)
            << error.what();
      }
      EXPECT_EQ(memory_image(*storage), before);
    }
  }
}

TEST(ZarrSave, ATorchDistSaveLeavesItAlone) {
  const FileImage before = saved();
  for (const bool overwrite : {false, true}) {
    const auto storage = memory_storage(before);
    SaveOptions options;
    options.overwrite = overwrite;
    EXPECT_THROW(save(row_state(solo(), 5), Location(storage), options), Error);
    EXPECT_EQ(memory_image(*storage), before);
  }
}

TEST(ZarrSave, KeysOfTwoRanksThatNeedOnePathAreRefusedAndNothingStays) {
  const auto storage = memory_storage();
  const std::vector<std::string> failed = failures(2, [&](Communicator comm) {
    const char* keys[] = {"w", "w/1/v"};
    StateDict state;
    state[keys[comm.rank()]] = ShardedTensor::from_box(
        keys[comm.rank()], counting(DType::kFloat32, {4}), {4}, Box::whole({4}));
    save(state, Location(storage), zarr_options(comm));
  });
  for (const std::string& error : failed) EXPECT_THAT(error, HasSubstr("w/1/v"));
  for (const std::string& name : storage->list()) {
    EXPECT_TRUE(name.starts_with(".tilestone/")) << name;
  }
}

}  // namespace tilestone::zarr_save_test
