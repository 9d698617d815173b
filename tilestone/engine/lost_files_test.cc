// Data files that are missing, too short, too long or damaged between their items.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/log.h"
#include "tilestone/comm/threads.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/repair.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::lost_files_test {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;
using TwoPhase = LoadOptions::TwoPhase;

constexpr int64_t kLarge = 300000;  // float32: read in parts

Value config() { return Value::tuple({Value("lr"), Value(0.5)}); }

// Two ranks that hold the same, and copy what the other one writes; with `own`, also a row of "w"
// each, of which there are no copies.
StateDict state_of(int rank, bool own, bool with_data = true) {
  const auto data = [&](const Dims& shape, int64_t first) {
    return with_data ? counting(DType::kFloat32, shape, first)
                     : TensorView::without_data(DType::kFloat32, shape);
  };
  StateDict state;
  for (const char* key : {"a", "b", "c", "d"}) {
    const int64_t size = key[0] == 'd' ? kLarge : 100;
    ShardedTensor tensor = ShardedTensor::from_rank_offsets(key, data({size}, key[0]), {}, {rank});
    tensor.holders = {0, 1};
    state[key] = tensor;
  }
  state["config"] = with_data ? config() : Value();
  if (own) {
    state["w"] = ShardedTensor::from_rank_offsets("w", data({1, 64}, 64 * rank), {{0, rank, 2}});
  }
  return state;
}

FileImage saved(bool own) {
  const auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    options.buffer_bytes = 1u << 20;
    options.replicate = SaveOptions::Replicate::kLocal;
    options.replicate_group = {0, 1};
    save(state_of(comm.rank(), own), Location(storage), options);
  });
  FileImage image = memory_image(*storage);
  image.erase(".tilestone/lock");
  return image;
}

std::string file_of(const FileImage& image, int rank) {
  for (const auto& [name, bytes] : image) {
    const bool data = name.ends_with(".distcp");
    if (data && name.find("__" + std::to_string(rank) + "_") != std::string::npos) return name;
  }
  throw std::logic_error("no data file");
}

// By `ranks`, of all that the two have; what each of them throws.
std::vector<std::string> loads(const FileImage& image, int ranks, TwoPhase mode, bool own) {
  return failures(ranks, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.threads = 1;
    options.timeout = 60;
    options.two_phase = mode;
    const StateDict loaded =
        load(state_of(comm.rank() % 2, own, false), Location(memory_storage(image)), options);
    EXPECT_EQ(loaded.get<Value>("config"), config());
    for (const char* key : {"a", "b", "c", "d"}) {
      const TensorView& data = loaded.get<ShardedTensor>(key).data;
      EXPECT_EQ(elements(data), elements(counting(DType::kFloat32, data.shape, key[0]))) << key;
    }
  });
}

TEST(LostFiles, WhatOtherFilesHoldIsReadFromThereWithOneWarningAFile) {
  const FileImage image = saved(false);
  for (const int rank : {0, 1}) {
    const std::string file = file_of(image, rank);
    for (const bool missing : {true, false}) {
      FileImage one = image;
      if (missing) {
        one.erase(file);
      } else {
        one[file].resize(one[file].size() / 2);
      }
      for (const int ranks : {1, 2, 4}) {
        for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
          SCOPED_TRACE(testing::Message() << file << ' ' << missing << ' ' << ranks);
          const LoggedWarnings logged;
          EXPECT_THAT(loads(one, ranks, mode, false), Each(""));
          EXPECT_THAT(logged.texts(),
                      Each(AllOf(HasSubstr(file), HasSubstr("is read from other"))));
          EXPECT_LE(logged.texts().size(), static_cast<size_t>(ranks));
          EXPECT_TRUE(ranks == 4 || !logged.texts().empty());
        }
      }
      const LoggedWarnings logged;
      const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(one)));
      for (const std::string key : {"a", "b", "c", "d"}) {
        EXPECT_EQ(elements(checkpoint.read(key)),
                  elements(counting(DType::kFloat32, {key == "d" ? kLarge : 100}, key[0])));
      }
      EXPECT_EQ(checkpoint.read_object("config"), config());
      EXPECT_LE(logged.texts().size(), 1u);
    }
  }
}

TEST(LostFiles, WithoutAnotherFileTheErrorNamesKeyAndFile) {
  FileImage image = saved(true);
  const std::string file = file_of(image, 1);
  image.erase(file);
  const LogLevel before = set_log_level(LogLevel::kOff);
  for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
    const auto texts = loads(image, 2, mode, true);
    EXPECT_THAT(texts, Each(HasSubstr(file)));
  }
  const auto texts = failures(
      1, [&](Communicator) { Checkpoint::open(Location(memory_storage(image))).read("w"); });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("key w"), HasSubstr(file)));
  set_log_level(before);
}

// What of a file is damaged, and how it is then.
FileImage damaged(FileImage image, const std::string& file, int kind) {
  Bytes& bytes = image[file];
  if (kind == 0) image.erase(file);
  if (kind == 1) bytes.resize(bytes.size() / 2);
  if (kind == 2) bytes.resize(bytes.size() + 100, std::byte{7});
  return image;
}

TEST(LostFiles, RepairWritesAFileAnewAsItsSaveWroteIt) {
  const FileImage image = saved(false);
  for (const int kind : {0, 1, 2}) {
    SCOPED_TRACE(kind);
    const std::string file = file_of(image, 0);
    const auto storage = memory_storage(damaged(image, file, kind));
    const RepairReport report = repair(Location(storage));
    ASSERT_FALSE(report.mended.empty());
    for (const Damage& damage : report.mended) EXPECT_EQ(damage.file, file);
    EXPECT_TRUE(report.now.ok());
    FileImage after = memory_image(*storage);
    after.erase(".tilestone/lock");
    EXPECT_EQ(after, image);
  }
}

TEST(LostFiles, OneWithSomethingThatIsIntactNowhereStaysAndVerifySaysWhat) {
  const FileImage image = saved(true);
  const std::string file = file_of(image, 0);
  for (const int kind : {0, 1}) {
    FileImage one = damaged(image, file, kind);
    if (kind == 1) one[file].resize(10);
    const auto storage = memory_storage(one);
    const RepairReport report = repair(Location(storage));
    EXPECT_THAT(report.mended, testing::IsEmpty());
    ASSERT_FALSE(report.now.ok());
    EXPECT_EQ(report.now.damages[0].file, file);
    EXPECT_THAT(report.now.damages, testing::Contains(testing::Field(
                                        &Damage::problem, HasSubstr("intact nowhere else: w"))));
    FileImage after = memory_image(*storage);
    after.erase(".tilestone/lock");
    EXPECT_EQ(after, one);
  }
}

// Zeros, by which nothing of the checkpoint is lost.
TEST(LostFiles, BytesBetweenItemsAreSaidToBeNoItemsAndMended) {
  const FileImage image = saved(true);
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const std::string file = file_of(image, 0);
  const Bytes& bytes = image.at(file);
  std::vector<bool> of_item(bytes.size(), false);
  const auto note = [&](const ItemLocation& at) {
    if (metadata.files[at.file] != file) return;
    std::fill_n(of_item.begin() + static_cast<ptrdiff_t>(at.offset), at.length, true);
  };
  for (const StoredTensor& tensor : metadata.tensors) note(tensor.chunks[0].at);
  for (const StoredCopy& copy : metadata.copies) note(copy.at);
  for (const StoredObject& object : metadata.objects) {
    note(object.at);
    for (const ItemLocation& copy : object.copies) note(copy);
  }
  const auto gap = std::find(of_item.begin(), of_item.end(), false);
  ASSERT_NE(gap, of_item.end()) << "the file has no bytes between its items";
  FileImage one = image;
  one[file][static_cast<size_t>(gap - of_item.begin())] = std::byte{9};
  const auto storage = memory_storage(one);
  const auto damages = Checkpoint::open(Location(storage)).verify().damages;
  ASSERT_THAT(damages, SizeIs(1));
  EXPECT_THAT(damages[0].problem, HasSubstr("no tensor or object is damaged by that"));
  const RepairReport report = repair(Location(storage));
  EXPECT_THAT(report.mended, SizeIs(1));
  EXPECT_TRUE(report.now.ok());
  EXPECT_EQ(memory_image(*storage).at(file), bytes);
}

TEST(LostFiles, ARepairOfAMissingFileThatIsCutShortLeavesItMissingOrWhole) {
  const FileImage image = saved(false);
  const std::string file = file_of(image, 0);
  FileImage one = image;
  one.erase(file);
  const auto repair_on = [&](const FaultHook& hook) {
    const auto disk = FaultDisk::create(memory_storage(one), hook);
    try {
      repair(Location(disk->storage()));
    } catch (const Error&) {
    }
    return disk;
  };
  const LogLevel before = set_log_level(LogLevel::kOff);
  const uint64_t calls = repair_on({})->calls();
  int whole = 0;
  for (uint64_t at = 0; at < calls; ++at) {
    const auto disk = repair_on([&](const StorageCall& call) {
      return call.index == at ? FaultAction::crash_after() : FaultAction::pass();
    });
    for (const Survival survival :
         {Survival::kAll, Survival::kNothingUnsynced, Survival::kRandom}) {
      const FileImage after = disk->surviving_image(survival, at);
      const auto found = after.find(file);
      if (found != after.end()) {
        EXPECT_EQ(found->second, image.at(file)) << at;
        ++whole;
      }
      EXPECT_TRUE(repair(Location(memory_storage(after))).now.ok()) << at;
    }
  }
  EXPECT_GT(whole, 0);
  set_log_level(before);
}

TEST(LostFiles, ASecondRepairSaysThatOneIsUnderWay) {
  FileImage image = saved(false);
  image.erase(file_of(image, 0));
  const auto storage = memory_storage(image);
  std::string refused;
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    if (call.op != StorageOp::kCreate || !call.name.ends_with(".repair.tmp")) {
      return FaultAction::pass();
    }
    try {
      repair(Location(storage));
    } catch (const Error& error) {
      refused = error.what();
    }
    return FaultAction::pass();
  });
  EXPECT_TRUE(repair(Location(disk->storage())).now.ok());
  EXPECT_THAT(refused, HasSubstr("a repair to"));
  EXPECT_THAT(refused, HasSubstr("is under way"));
}

}  // namespace tilestone::lost_files_test
