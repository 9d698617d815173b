// Data files that are missing, too short, too long, damaged or unreadable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::lost_files_test {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;
using TwoPhase = Reading::TwoPhase;

constexpr int64_t kLarge = 300000;  // float32: read in several parts

Value config() { return Value::tuple({Value("lr"), Value(0.5)}); }

// Two ranks that hold the same tensors, and copy what the other one writes. With `own`, each also
// has a row of "w", of which there are no copies.
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
    options.resources.buffer_bytes = 1u << 20;
    options.copies.emplace();
    options.copies->group = {0, 1};
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

// Loads everything that the two ranks have on `ranks` ranks; returns what each rank throws.
std::vector<std::string> loads(const std::shared_ptr<Storage>& storage, int ranks, TwoPhase mode,
                               bool own) {
  return failures(ranks, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    options.timeout = 60;
    options.reading.two_phase = mode;
    const StateDict loaded =
        load(state_of(comm.rank() % 2, own, false), Location(storage), options);
    EXPECT_EQ(loaded.get<Value>("config"), config());
    for (const char* key : {"a", "b", "c", "d"}) {
      const TensorView& data = loaded.get<ShardedTensor>(key).data;
      EXPECT_EQ(elements(data), elements(counting(DType::kFloat32, data.shape, key[0]))) << key;
    }
  });
}

std::vector<std::string> loads(const FileImage& image, int ranks, TwoPhase mode, bool own) {
  return loads(memory_storage(image), ranks, mode, own);
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

// Stock writers leave no manifest.
FileImage without_manifest(FileImage image) {
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
  return image;
}

TEST(LostFiles, AMissingOneIsDamageOfACheckpointAndNotAMissingCheckpoint) {
  for (FileImage image : {saved(true), without_manifest(saved(true))}) {
    const std::string file = file_of(image, 1);
    image.erase(file);
    const Location location(memory_storage(image));
    const Checkpoint checkpoint = Checkpoint::open(location);
    const auto load_w = [&](TwoPhase mode) {
      LoadOptions options;
      options.reading.two_phase = mode;
      StateDict wanted;
      wanted["w"] = ShardedTensor::from_rank_offsets(
          "w", TensorView::without_data(DType::kFloat32, {2, 64}), {});
      load(wanted, location, options);
    };
    const auto read_large = [&] {
      const std::vector<std::string> keys = {"w"};
      checkpoint.read_many(keys);
    };
    for (const std::function<void()>& read : std::vector<std::function<void()>>{
             [&] { checkpoint.read("w"); }, read_large, [&] { load_w(TwoPhase::kNever); },
             [&] { load_w(TwoPhase::kAlways); }, [&] { load(std::nullopt, location); }}) {
      expect_error(read, ErrorCode::kCorrupt, "a data file of the checkpoint is missing");
      expect_error(read, ErrorCode::kCorrupt, file);
    }
    EXPECT_THAT(checkpoint.verify().damages,
                testing::Contains(
                    AllOf(testing::Field(&Damage::file, file),
                          testing::Field(&Damage::problem, HasSubstr("the file is missing")))));
  }
}

TEST(LostFiles, TheIndexThatMetadataJsonNamesIsDamageToo) {
  const auto storage = memory_storage();
  SaveOptions options;
  options.dialect = megatron_dialect();
  save(row_state(solo(), 1), Location(storage), options);
  const Location location(storage);
  const std::function<void()> reads[] = {[&] { Checkpoint::open(location); },
                                         [&] { load(std::nullopt, location); }};
  storage->remove(".metadata");
  for (const auto& read : reads) {
    expect_error(read, ErrorCode::kCorrupt, "is missing");
    expect_error(read, ErrorCode::kCorrupt, "metadata.json");
  }
  {
    const auto lock = storage->claim(".tilestone/lock");  // as while a save is under way
    for (const auto& read : reads) expect_error(read, ErrorCode::kNotFound, "no checkpoint");
  }
  storage->remove("metadata.json");
  for (const auto& read : reads) expect_error(read, ErrorCode::kNotFound, "no checkpoint");
}

TEST(LostFiles, OfACheckpointThatWasReplacedOrRemovedAreNoDamage) {
  for (const FileImage& image : {saved(true), without_manifest(saved(true))}) {
    for (const bool removed : {false, true}) {
      const auto storage = memory_storage(image);
      const Checkpoint checkpoint = Checkpoint::open(Location(storage));
      if (removed) {
        for (const std::string& name : storage->list()) storage->remove(name);
      } else {
        SaveOptions options;
        options.overwrite = true;
        save(row_state(solo(), 1), Location(storage), options);
        // Without a manifest, a save does not know the data files of the old checkpoint as its own.
        for (const auto& [name, bytes] : image) {
          if (name.ends_with(".distcp") && storage->stat(name)) storage->remove(name);
        }
      }
      const std::string said = removed ? "no checkpoint is here: it was removed"
                                       : "another save may have replaced the checkpoint";
      expect_error([&] { checkpoint.read("w"); }, ErrorCode::kNotFound, said);
      expect_error([&] { checkpoint.verify(); }, ErrorCode::kNotFound, said);
    }
  }
}

TEST(LostFiles, AFileWithoutBytesIsSaidToBeTooShortAndNotMissing) {
  const FileImage image = saved(false);
  for (const bool missing : {false, true}) {
    FileImage one = image;
    const std::string file = file_of(image, 0);
    one[file].clear();
    if (missing) one.erase(file);
    const std::string said = missing ? " is missing: " : " is too short (0 bytes): ";
    const LoggedWarnings logged;
    EXPECT_THAT(loads(one, 1, TwoPhase::kNever, false), Each(""));
    EXPECT_THAT(logged.texts(), ElementsAre(HasSubstr(file + said)));
  }
}

// A storage that fails like a broken disk for calls where `is_broken` is true.
std::shared_ptr<Storage> broken(const FileImage& image,
                                const std::function<bool(const StorageCall&)>& is_broken) {
  return FaultDisk::create(memory_storage(image),
                           [is_broken](const StorageCall& call) {
                             return is_broken(call) ? FaultAction::fail(EIO) : FaultAction::pass();
                           })
      ->storage();
}

// A bad sector at the item of "d" in a file, until the file is replaced. The item is larger than a
// buffer of verify, or not.
TEST(UnreadableFiles, AreDamageForVerifyAndRepairReplacesThemFromCopies) {
  const FileImage image = saved(false);
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const ItemLocation at = metadata.find_tensor("d")->chunks[0].at;
  const std::string file = metadata.files[at.file];
  for (const uint64_t buffer : {128u << 10, 64u << 20}) {
    const auto inner = memory_storage(image);
    std::atomic<bool> is_bad = true;
    const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
      if (call.op == StorageOp::kRename && call.to == file) is_bad = false;
      const uint64_t sector = at.offset + at.length / 2;
      const bool hit = is_bad && call.op == StorageOp::kRead && call.name == file &&
                       call.offset <= sector && sector < call.offset + call.size;
      return hit ? FaultAction::fail(EIO) : FaultAction::pass();
    });
    OpenOptions options;
    options.resources.buffer_bytes = buffer;
    const VerifyReport found = Checkpoint::open(Location(disk->storage()), options).verify();
    ASSERT_THAT(found.damages, SizeIs(1));
    EXPECT_EQ(found.damages[0].file, file);
    EXPECT_EQ(found.damages[0].key, "d");
    EXPECT_NE(found.damages[0].intact_in, "");
    EXPECT_THAT(found.damages[0].problem, HasSubstr("the disk can't read these bytes"));
    const RepairReport report = repair(Location(disk->storage()), options);
    EXPECT_THAT(report.mended, SizeIs(1));
    EXPECT_TRUE(report.now.ok());
    FileImage after = memory_image(*inner);
    after.erase(".tilestone/lock");
    EXPECT_EQ(after, image);
  }
}

TEST(UnreadableFiles, WithSomethingThatIsIntactNowhereStay) {
  const FileImage image = saved(true);
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const ItemLocation at = metadata.find_tensor("w")->chunks[0].at;
  const std::string file = metadata.files[at.file];
  const auto storage = broken(image, [&](const StorageCall& call) {
    return call.op == StorageOp::kRead && call.name == file &&
           call.offset < at.offset + at.length && at.offset < call.offset + call.size;
  });
  const RepairReport report = repair(Location(storage));
  EXPECT_THAT(report.mended, testing::IsEmpty());
  ASSERT_THAT(report.now.damages, SizeIs(1));
  EXPECT_EQ(report.now.damages[0].key, "w");
  EXPECT_EQ(report.now.damages[0].intact_in, "");
}

// The whole file, opening it, or one of its chunks can't be read: the other contents of the file
// are then still read from it.
TEST(UnreadableFiles, AreReadFromOtherFilesWithAWarningOfKeyAndFile) {
  const FileImage image = saved(false);
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  for (const std::string key : {"", "open", "a", "d"}) {
    const StoredTensor* tensor = metadata.find_tensor(key);
    const ItemLocation at = tensor != nullptr ? tensor->chunks[0].at : ItemLocation();
    const std::string file = tensor != nullptr ? metadata.files[at.file] : file_of(image, 0);
    const auto storage = broken(image, [&](const StorageCall& call) {
      if (call.name != file) return false;
      if (key == "open") return call.op == StorageOp::kOpen;
      if (call.op != StorageOp::kRead) return false;
      return tensor == nullptr ||
             (call.offset < at.offset + at.length && at.offset < call.offset + call.size);
    });
    for (const int ranks : {1, 2, 4}) {
      for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
        SCOPED_TRACE(testing::Message() << file << ' ' << key << ' ' << ranks);
        const LoggedWarnings logged;
        EXPECT_THAT(loads(storage, ranks, mode, false), Each(""));
        EXPECT_THAT(logged.texts(), Each(AllOf(HasSubstr(file), HasSubstr("Input/output error"))));
        const std::string named = tensor != nullptr ? '"' + key + '"' : "";
        EXPECT_THAT(logged.texts(), Each(HasSubstr(named)));
      }
    }
    const LoggedWarnings logged;
    const Checkpoint checkpoint = Checkpoint::open(Location(storage));
    for (const std::string each : {"a", "b", "c", "d"}) {
      EXPECT_EQ(elements(checkpoint.read(each)),
                elements(counting(DType::kFloat32, {each == "d" ? kLarge : 100}, each[0])));
    }
    EXPECT_EQ(checkpoint.read_object("config"), config());
    EXPECT_THAT(logged.texts(), testing::Not(testing::IsEmpty()));
  }
}

TEST(UnreadableFiles, WithoutAnotherFileTheErrorNamesKeyAndFile) {
  const FileImage image = saved(true);
  const std::string file = file_of(image, 1);
  const auto storage = broken(image, [&](const StorageCall& call) {
    return call.op == StorageOp::kRead && call.name == file;
  });
  const LogLevel before = set_log_level(LogLevel::kOff);
  for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
    EXPECT_THAT(loads(storage, 2, mode, true),
                Each(AllOf(HasSubstr("Input/output error"), HasSubstr(file))));
  }
  const auto texts =
      failures(1, [&](Communicator) { Checkpoint::open(Location(storage)).read("w"); });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("key w"), HasSubstr(file), HasSubstr("Input/output")));
  set_log_level(before);
}

constexpr int64_t kRows = 256;
constexpr int64_t kColumns = 1024;

// "e", which three ranks hold: its own item and two copies.
FileImage saved_thrice() {
  const auto storage = memory_storage();
  run_ranks(3, [&](Communicator comm) {
    ShardedTensor e = ShardedTensor::from_rank_offsets(
        "e", counting(DType::kFloat32, {kRows, kColumns}, 5), {}, {comm.rank()});
    e.holders = {0, 1, 2};
    StateDict state;
    state["e"] = e;
    SaveOptions options;
    options.comm = comm;
    options.resources.buffer_bytes = 4u << 20;
    options.copies.emplace();
    options.copies->group = {0, 1, 2};
    save(state, Location(storage), options);
  });
  return memory_image(*storage);
}

// Loads "e" on four ranks, each of which wants a quarter of the columns or all of it. Returns what
// each rank throws.
std::vector<std::string> loads_e(const FileImage& image, TwoPhase mode, bool whole,
                                 const FaultHook& hook = {}) {
  constexpr int kRanks = 4;
  const auto disk = FaultDisk::create(memory_storage(image), hook);
  return failures(kRanks, [&](Communicator comm) {
    const int parts = whole ? 1 : kRanks;
    const int part = whole ? 0 : comm.rank();
    LoadOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    options.timeout = 60;
    options.reading.two_phase = mode;
    StateDict wanted;
    wanted["e"] = ShardedTensor::from_rank_offsets(
        "e", TensorView::without_data(DType::kFloat32, {kRows, kColumns / parts}),
        {{1, part, parts}});
    const StateDict loaded = load(wanted, Location(disk->storage(comm.rank())), options);
    const TensorView all = counting(DType::kFloat32, {kRows, kColumns}, 5);
    const TensorView& data = loaded.get<ShardedTensor>("e").data;
    EXPECT_EQ(elements(data),
              elements(all.narrow({{0, part * data.shape[1]}, {kRows, data.shape[1]}})));
  });
}

// Each rank wants only a part of the chunk.
TEST(UnreadableFiles, TheSubstituteOfADamagedChunkIsCheckedToo) {
  const FileImage image = saved_thrice();
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const auto damage = [&](FileImage& one, uint32_t place) {
    const ItemLocation& at = metadata.place(0, 0, place);
    Bytes& bytes = one[metadata.files[at.file]];
    for (uint64_t i = at.length / 4; i < at.length * 3 / 4; ++i) bytes[at.offset + i] = {};
  };
  ASSERT_EQ(metadata.copies_of(0, 0).size(), 2u);
  FileImage none = image;
  damage(none, kNoCopy);
  for (const uint32_t copy : {0u, 1u}) {
    SCOPED_TRACE(copy);
    FileImage one = image;
    damage(one, kNoCopy);
    damage(one, copy);
    damage(none, copy);
    const LoggedWarnings logged;
    EXPECT_THAT(loads_e(one, TwoPhase::kAlways, false), Each(""));
    EXPECT_THAT(logged.texts(), Each(HasSubstr("\"e\"")));
    EXPECT_THAT(logged.texts(), testing::Not(testing::IsEmpty()));
  }
  const LogLevel before = set_log_level(LogLevel::kOff);
  EXPECT_THAT(loads_e(none, TwoPhase::kAlways, false),
              Each(AllOf(HasSubstr("key e"), HasSubstr("is damaged"), HasSubstr(".distcp"))));
  set_log_level(before);
}

TEST(LostFiles, WhatOneHeldIsReadFromAllThatHoldItToo) {
  FileImage image = saved_thrice();
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  image.erase(metadata.files[metadata.place(0, 0, kNoCopy).file]);
  const LogLevel before = set_log_level(LogLevel::kOff);
  for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
    std::mutex mutex;
    std::set<std::string> read;
    std::map<std::pair<int, std::string>, int> asked;  // stat() calls, by rank and file
    const auto note = [&](const StorageCall& call) {
      const std::lock_guard lock(mutex);
      const std::string name(call.name);
      if (!name.ends_with(".distcp")) return FaultAction::pass();
      if (call.op == StorageOp::kRead) read.insert(name);
      if (call.op == StorageOp::kStat) ++asked[{call.client, name}];
      return FaultAction::pass();
    };
    EXPECT_THAT(loads_e(image, mode, true, note), Each(""));
    EXPECT_THAT(read, SizeIs(2));
    for (const auto& [of, times] : asked) EXPECT_EQ(times, 1) << of.first << ' ' << of.second;
  }
  set_log_level(before);
}

// Damages the file in one of several ways (`kind`).
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
                                        &Damage::problem, HasSubstr("without an intact copy: w"))));
    FileImage after = memory_image(*storage);
    after.erase(".tilestone/lock");
    EXPECT_EQ(after, one);
  }
}

// Gaps of zeros: their damage loses nothing of the checkpoint.
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
  EXPECT_THAT(damages[0].problem, HasSubstr("damages no tensor or object"));
  const RepairReport report = repair(Location(storage));
  EXPECT_THAT(report.mended, SizeIs(1));
  EXPECT_TRUE(report.now.ok());
  EXPECT_EQ(memory_image(*storage).at(file), bytes);
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
  EXPECT_THAT(refused, HasSubstr("a repair is under way"));
  EXPECT_THAT(refused, HasSubstr("is under way"));
}

}  // namespace tilestone::lost_files_test
