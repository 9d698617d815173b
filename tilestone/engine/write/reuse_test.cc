// SaveOptions::reuse: what an earlier checkpoint has is not written again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>

#include "tilestone/base/block_sums.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/write/reuse_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/state/device_memory_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::reuse_test {

using engine::hash_if_unchanged;
using engine::kMaxSteps;
using engine::Way;
using engine::ways_of;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// ---- The decision

constexpr uint64_t kMiB = 1u << 20;

TEST(Reuse, LinksWhatIsKnownByItsHashAndWritesApartWhatIsUnchangedForTheFirstTime) {
  const std::vector<ReceiptFile> files = {{"shared", 2 * kMiB, 1}, {"other", 9 * kMiB, 0}};
  EXPECT_THAT(ways_of({{{0, 2 * kMiB, true}, {1, 2 * kMiB, false}}}, files, 4 * kMiB),
              ElementsAre(Way::kLinked, Way::kApart));
}

TEST(Reuse, WritesFewUnchangedBytesWithEverythingElse) {
  const std::vector<ReceiptFile> files = {{"other", kMiB, 0}};
  EXPECT_THAT(ways_of({{{0, kMiB - 1, false}}}, files, 4 * kMiB), ElementsAre(Way::kWritten));
}

TEST(Reuse, WritesAFileAnewThatTwentyStepsShare) {
  const std::vector<ReceiptFile> files = {{"young", 2 * kMiB, kMaxSteps - 1},
                                          {"old", 2 * kMiB, kMaxSteps}};
  EXPECT_THAT(ways_of({{{0, 2 * kMiB, true}, {1, 2 * kMiB, true}}}, files, 4 * kMiB),
              ElementsAre(Way::kLinked, Way::kApart));
}

TEST(Reuse, LinksFilesWhoseUnneededBytesAreATenthOfTheStepAtMost) {
  const std::vector<ReceiptFile> files = {{"half", 20 * kMiB, 1}, {"most", 11 * kMiB, 1}};
  EXPECT_THAT(ways_of({{{0, 11 * kMiB, true}, {1, 10 * kMiB, true}}}, files, 40 * kMiB),
              ElementsAre(Way::kApart, Way::kLinked));
  // However large the step is, it must need half of each file.
  EXPECT_THAT(ways_of({{{0, 9 * kMiB, true}, {1, 10 * kMiB, true}}}, files, 4000 * kMiB),
              ElementsAre(Way::kApart, Way::kLinked));
}

ItemChecksums sums_of(ByteView bytes) {
  BlockSummer summer(bytes.size());
  summer.add(bytes);
  BlockSums blocks = summer.take();
  ItemChecksums sums{0, blocks.combined(), 0};
  if (blocks.crc32.size() > 1) sums.blocks = std::make_shared<BlockSums>(std::move(blocks));
  return sums;
}

TEST(Reuse, ComparesTensorsOfAnyStridesBlockByBlock) {
  TensorView tensor = counting(DType::kFloat32, {600, 500});
  TensorView turned = tensor;
  std::swap(turned.shape[0], turned.shape[1]);
  std::swap(turned.strides[0], turned.strides[1]);
  for (const TensorView& each : {tensor, turned}) {
    const Bytes bytes = elements(each);
    const auto hash = hash_if_unchanged(each, sums_of(bytes), nullptr, Deadline::never());
    Hasher128 whole;
    whole.add(bytes);
    EXPECT_EQ(hash, whole.value());
    for (const size_t at : {size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
      Bytes changed = bytes;
      changed[at] ^= std::byte{1};
      EXPECT_EQ(hash_if_unchanged(each, sums_of(changed), nullptr, Deadline::never()),
                std::nullopt);
    }
    EXPECT_EQ(
        hash_if_unchanged(each, sums_of(ByteView(bytes).first(99)), nullptr, Deadline::never()),
        std::nullopt);
  }
}

// ---- Saves

// Of each step: a frozen part of two tensors, 3 MiB, and a small one that changes.
StateDict state_of(int64_t step, const TensorView& frozen) {
  StateDict state;
  state["frozen"] = frozen;
  state["head"] = counting(DType::kFloat32, {40, 1000}, 7);
  state["hot"] = counting(DType::kFloat32, {50, 1000}, step);
  state["step"] = step;
  return state;
}
TensorView frozen_part() { return counting(DType::kFloat32, {800, 1000}, 1); }
StateDict state_of(int64_t step) { return state_of(step, frozen_part()); }

constexpr uint64_t kWhole = (800 + 40 + 50) * 4000;  // bytes of the tensors
constexpr uint64_t kFrozen = (800 + 40) * 4000;

// The steps of a run in one storage.
struct Steps {
  std::shared_ptr<Storage> storage = memory_storage();
  SaveResult save(int step, int earlier, const StateDict& state, SaveOptions options = {}) const {
    if (earlier >= 0) options.reuse = at(earlier);
    return tilestone::save(state, at(step), options);
  }
  SaveResult save(int step, int earlier) const { return save(step, earlier, state_of(step)); }
  Location at(int step) const { return Location(storage->child("step_" + std::to_string(step))); }
  // Every byte is as it was saved.
  void expect(int step, int64_t says) const { expect(step, says, frozen_part()); }
  void expect(int step, int64_t says, const TensorView& frozen) const {
    const Checkpoint checkpoint = Checkpoint::open(at(step));
    EXPECT_TRUE(checkpoint.verify().ok()) << step;
    EXPECT_EQ(elements(checkpoint.read("frozen")), elements(frozen)) << step;
    EXPECT_EQ(elements(checkpoint.read("hot")),
              elements(counting(DType::kFloat32, {50, 1000}, says)));
    EXPECT_EQ(checkpoint.read_object("step").as_int(), says);
  }
  Manifest manifest(int step) const {
    for (const std::string& name : at(step).storage().list(".tilestone/")) {
      if (!name.ends_with(".manifest")) continue;
      return Manifest::decode(read_file(at(step).storage(), name, UINT64_MAX), name);
    }
    throw std::logic_error("no manifest");
  }
  uint32_t most_steps(int step) const {
    uint32_t most = 0;
    const Manifest saved = manifest(step);
    for (const Receipt& receipt : saved.receipts) {
      for (const ReceiptFile& file : receipt.files) most = std::max(most, file.steps);
    }
    return most;
  }
  void remove(int step) const { storage->remove_tree("step_" + std::to_string(step)); }
};

TEST(Reuse, UnchangedTensorsAreWrittenTwiceAndThenShared) {
  const Steps run;
  EXPECT_GT(run.save(0, -1).bytes_written, kWhole);
  const SaveResult second = run.save(1, 0);
  EXPECT_GT(second.bytes_written, kWhole);
  EXPECT_EQ(second.bytes_shared, 0u);
  for (int step = 2; step < 5; ++step) {
    const SaveResult next = run.save(step, step - 1);
    EXPECT_LT(next.bytes_written, kWhole - kFrozen + 32000) << step;
    EXPECT_GT(next.bytes_shared, kFrozen);
    EXPECT_EQ(run.most_steps(step), static_cast<uint32_t>(step));
  }
  for (int step = 0; step < 5; ++step) run.expect(step, step);
}

TEST(Reuse, EachStepStaysWholeWhicheverOthersAreRemovedOrCopied) {
  const Steps run;
  for (int step = 0; step < 5; ++step) run.save(step, step - 1);
  for (const int gone : {2, 0, 4}) run.remove(gone);
  run.expect(1, 1);
  run.expect(3, 3);
  run.save(5, 3);
  EXPECT_EQ(run.most_steps(5), 4u);
  run.remove(3);
  run.expect(5, 5);
}

TEST(Reuse, TwentyStepsShareAFileAndThenItIsWrittenAnew) {
  const Steps run;
  for (int step = 0; step <= 22; ++step) {
    const SaveResult result = run.save(step, step - 1);
    const bool anew = step < 2 || step == 21;
    EXPECT_EQ(result.bytes_written > kWhole, anew) << step;
    EXPECT_LE(run.most_steps(step), kMaxSteps);
    run.expect(step, step);
    if (step > 0) run.remove(step - 1);
  }
}

TEST(Reuse, AChangedTensorIsWrittenAndWhatStandsBesideItAnewIfTooMuchWouldBeWasted) {
  const Steps run;
  for (int step = 0; step < 3; ++step) run.save(step, step - 1);
  TensorView other = frozen_part();
  other.data[1234567] ^= std::byte{1};
  const SaveResult changed = run.save(3, 2, state_of(3, other));
  EXPECT_EQ(changed.bytes_shared, 0u);  // "head" is a small part of its file
  run.expect(3, 3, other);
  run.save(4, 3, state_of(4, other));
  EXPECT_GT(run.save(5, 4, state_of(5, other)).bytes_shared, 800u * 4000);
  run.expect(5, 5, other);
  run.expect(2, 2);
}

TEST(Reuse, TheStepThatIsOverwrittenCanBeReused) {
  for (const bool objects : {false, true}) {
    const Steps run{objects ? memory_objects() : memory_storage()};
    SaveOptions options;
    options.overwrite = true;
    run.save(0, -1);
    for (int again = 1; again < 4; ++again) {
      const SaveResult result = run.save(0, 0, state_of(again), options);
      EXPECT_EQ(result.bytes_shared > kFrozen, again > 1);
      run.expect(0, again);
    }
    // Metadata, manifest, two data files, and perhaps a lock.
    EXPECT_LE(run.at(0).storage().list("").size(), 5u);
  }
}

TEST(Reuse, WhatCantBeLinkedIsWritten) {
  Steps run;
  run.save(0, -1);
  run.save(1, 0);
  SaveOptions options;
  options.reuse = run.at(1);
  const Steps elsewhere;
  EXPECT_GT(elsewhere.save(2, -1, state_of(2), options).bytes_shared, 0u);  // memory links anywhere
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    return call.op == StorageOp::kLink ? FaultAction::fail(EMLINK) : FaultAction::pass();
  });
  EXPECT_THROW(save(state_of(2), Location(disk->storage()), options), Error);
  const TempDirectory directory;
  const Location posix(directory.path() + "/2");
  EXPECT_GT(save(state_of(2), posix, options).bytes_written, kWhole);
  EXPECT_TRUE(Checkpoint::open(posix).verify().ok());
}

TEST(Reuse, WithoutAnEarlierCheckpointEverythingIsWrittenAndTheLogSaysSo) {
  const LoggedWarnings warnings;
  const Steps run;
  EXPECT_GT(run.save(1, 0).bytes_written, kWhole);
  EXPECT_THAT(warnings.texts(), ElementsAre(HasSubstr("nothing is reused")));
  run.expect(1, 1);
}

TEST(Reuse, AFileThatHasGoneOrIsTooShortIsWritten) {
  for (const bool gone : {true, false}) {
    const Steps run;
    for (int step = 0; step < 2; ++step) run.save(step, step - 1);
    const Manifest saved = run.manifest(1);
    for (const ReceiptFile& file : saved.receipts[0].files) {
      const auto storage = run.at(1).shared();
      storage->remove(file.name);
      if (!gone) storage->create(file.name)->close();
    }
    EXPECT_GT(run.save(2, 1).bytes_written, kWhole);
    run.expect(2, 2);
  }
}

TEST(Reuse, LinksOfAFileSystemAreFurtherNamesOfOneFile) {
  const TempDirectory directory;
  const Steps run{posix_storage(directory.path())};
  for (int step = 0; step < 4; ++step) run.save(step, step - 1);
  nlink_t most = 0;
  const Manifest saved = run.manifest(3);
  for (const ReceiptFile& file : saved.receipts[0].files) {
    struct stat info;
    const std::string path = directory.path() + "/step_3/" + file.name;
    ASSERT_EQ(::stat(path.c_str(), &info), 0);
    most = std::max(most, info.st_nlink);
  }
  EXPECT_EQ(most, 3u);
  run.remove(1);
  run.remove(2);
  run.expect(3, 3);
}

TEST(Reuse, RanksShareWhatTheyWriteWithAndWithoutACommunicator) {
  const auto rows_of = [](int rank, int64_t step) {
    StateDict state;
    state["w"] = ShardedTensor::from_rank_offsets(
        "w", counting(DType::kFloat32, {1, 500000}, 500000 * rank), {{0, rank, 2}});
    state["hot"] = ShardedTensor::from_rank_offsets(
        "hot", counting(DType::kFloat32, {1, 5000}, step + rank), {{0, rank, 2}});
    return state;
  };
  for (const bool files : {false, true}) {
    const Steps run;
    for (int step = 0; step < 4; ++step) {
      std::vector<uint64_t> shared(2);
      run_ranks(2, [&](Communicator comm) {
        const int rank = comm.rank();
        SaveOptions options;
        if (files) {
          options = by_files(rank, 2, "a run of a test " + std::to_string(step), true);
        } else {
          options.comm = comm;
        }
        shared[static_cast<size_t>(rank)] =
            run.save(step, step - 1, rows_of(rank, step), options).bytes_shared;
      });
      for (const uint64_t bytes : shared) EXPECT_EQ(bytes > 2000000, step > 1) << files;
    }
    run.remove(2);
    const Checkpoint checkpoint = Checkpoint::open(run.at(3));
    EXPECT_TRUE(checkpoint.verify().ok());
    EXPECT_EQ(elements(checkpoint.read("w")), elements(counting(DType::kFloat32, {2, 500000})));
  }
}

TEST(Reuse, TensorsOnADeviceAreComparedThere) {
  const Steps run;
  for (int step = 0; step < 3; ++step) {
    const auto device = LateDevice::create();
    StateDict state = state_of(step, device->put(frozen_part()));
    const SaveResult result = run.save(step, step - 1, state);
    EXPECT_EQ(result.bytes_shared > kFrozen, step == 2);
    EXPECT_EQ(device->unpinned, 0u);
    run.expect(step, step);
  }
}

TEST(Reuse, CopiesShareFilesOfTheirOwn) {
  const Steps run;
  for (int step = 0; step < 3; ++step) {
    run_ranks(2, [&](Communicator comm) {
      SaveOptions options;
      options.comm = comm;
      options.copies = LocalCopies{{0, 1}};
      const SaveResult result = run.save(step, step - 1, state_of(step), options);
      EXPECT_EQ(result.bytes_shared > 0, step == 2) << comm.rank();
    });
    run.expect(step, step);
  }
  const Checkpoint checkpoint = Checkpoint::open(run.at(2));
  const Metadata& metadata = checkpoint.metadata();
  ASSERT_FALSE(metadata.copies.empty());
  for (const StoredCopy& copy : metadata.copies) {
    EXPECT_NE(copy.at.file, metadata.tensors[copy.tensor].chunks[copy.chunk].at.file);
  }
}

TEST(Reuse, TorchsRankLocalModeRefusesIt) {
  const Steps run;
  run.save(0, -1);
  SaveOptions options = rank_local(0, 1);
  options.reuse = run.at(0);
  try {
    save(state_of(1), run.at(1), options);
    ADD_FAILURE() << "saved";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
}

TEST(Reuse, WithoutItNoCallIsMadeForIt) {
  std::vector<std::string> calls[2];
  for (const bool dense : {false, true}) {
    const auto disk = FaultDisk::create(memory_storage(), [&](const StorageCall& call) {
      calls[dense ? 1 : 0].emplace_back(to_string(call.op));
      return FaultAction::pass();
    });
    SaveOptions options;
    const Steps run;
    if (dense) {
      run.save(0, -1, state_of(9, counting(DType::kFloat32, {800, 1000}, 2)));
      options.reuse = run.at(0);
    }
    save(state_of(1), Location(disk->storage()), options);
  }
  EXPECT_EQ(calls[0], calls[1]);  // nor where nothing is shared
}

TEST(Reuse, AnEarlierManifestThatIsLargeOrDamagedIsReadInPartsOrIgnored) {
  const Steps run;
  for (int step = 0; step < 2; ++step) run.save(step, step - 1);
  const auto storage = run.at(1).shared();
  for (const std::string& name : storage->list(".tilestone/")) {
    if (!name.ends_with(".manifest")) continue;
    // A padding of unknown attributes makes it large.
    Manifest manifest = run.manifest(1);
    manifest.attributes["padding"] = std::string(5u << 20, 'x');
    storage->publish(name, name + ".tmp", manifest.encode(), true, Deadline::never());
    EXPECT_GT(run.save(2, 1).bytes_shared, kFrozen);
    storage->publish(name, name + ".tmp", Bytes(3000), true, Deadline::never());
  }
  EXPECT_EQ(run.save(3, 1).bytes_shared, 0u);
  run.expect(2, 2);
  run.expect(3, 3);
}

}  // namespace tilestone::reuse_test
