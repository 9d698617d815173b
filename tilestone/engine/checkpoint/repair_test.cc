// What a repair costs, writes and leaves behind, and what verify reports about items in truncated
// files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/checkpoint/repair_file_internal.h"
#include "tilestone/engine/checkpoint/repair_from_index_internal.h"
#include "tilestone/engine/commit/removal.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/posix_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::repair_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

namespace fs = std::filesystem;

constexpr int kRanks = 3;
constexpr const char* kKeys[] = {"a", "b", "c", "d", "e", "f"};

// All ranks hold the same tensors, and copy what the others write. With `own`, each rank also has a
// row of "w".
void save_to(const std::shared_ptr<Storage>& storage, bool own = false,
             std::shared_ptr<const Dialect> dialect = nullptr) {
  run_ranks(kRanks, [&](Communicator comm) {
    StateDict state;
    for (const char* key : kKeys) {
      const TensorView data = counting(DType::kFloat32, {1000}, key[0]);
      ShardedTensor tensor = ShardedTensor::from_rank_offsets(key, data, {}, {comm.rank()});
      tensor.holders = {0, 1, 2};
      state[key] = tensor;
    }
    if (own) {
      const TensorView row = counting(DType::kFloat32, {1, 1000}, 1000 * comm.rank());
      state["w"] = ShardedTensor::from_rank_offsets("w", row, {{0, comm.rank(), kRanks}});
    }
    SaveOptions options;
    options.comm = comm;
    options.resources.buffer_bytes = 1u << 20;
    options.dialect = dialect;
    options.overwrite = true;
    options.copies.emplace();
    options.copies->group = {0, 1, 2};
    save(state, Location(storage), options);
  });
}

FileImage saved(bool own = false) {
  const auto storage = memory_storage();
  save_to(storage, own);
  return memory_image(*storage);
}

std::string file_of(Storage& storage, int rank) {
  for (const std::string& name : storage.list()) {
    const bool data = name.ends_with(".distcp");
    if (data && name.find("__" + std::to_string(rank) + "_") != std::string::npos) return name;
  }
  throw std::logic_error("no data file");
}
std::string file_of(const FileImage& image, int rank) {
  return file_of(*memory_storage(image), rank);
}

// The item that the index names for a key, and its file.
std::pair<ItemLocation, std::string> item_of(const std::shared_ptr<Storage>& storage,
                                             const std::string& key) {
  const Metadata metadata = Checkpoint::open(Location(storage)).metadata();
  const ItemLocation at = metadata.find_tensor(key)->chunks[0].at;
  return {at, metadata.files[at.file]};
}

FileImage damaged(FileImage image, const std::string& key) {
  const auto [at, file] = item_of(memory_storage(image), key);
  image[file][at.offset + at.length / 2] ^= std::byte{4};
  return image;
}

struct Quiet {
  LogLevel before = set_log_level(LogLevel::kOff);
  ~Quiet() { set_log_level(before); }
};

// An opened checkpoint with `files` files, all of which hold the object.
engine::Opened with_copies(uint32_t files) {
  engine::Opened opened;
  opened.manifest.emplace();
  StoredObject object{"config", {}, {}};
  for (uint32_t file = 0; file < files; ++file) {
    opened.metadata.files.push_back("file " + std::to_string(file));
    const ItemLocation at{file, Codec::kNone, 0, 4, ItemChecksums{}};
    if (file == 0) object.at = at;
    if (file > 0) object.copies.push_back(at);
  }
  opened.metadata.objects.push_back(std::move(object));
  return opened;
}

std::set<uint32_t> all_files(const engine::Opened& opened) {
  std::set<uint32_t> files;
  for (uint32_t i = 0; i < opened.metadata.files.size(); ++i) files.insert(i);
  return files;
}

uint64_t memory_in_use() {
  uint64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

TEST(Repair, TheMemoryForAnItemFollowsTheNumberOfItsCopies) {
  const engine::Opened opened = with_copies(4000);
  const auto storage = memory_storage();
  const uint64_t before = memory_in_use();
  const engine::FileMaker maker(*storage, opened, all_files(opened));
  const uint64_t after = memory_in_use();
  EXPECT_LE(after, before + (64u << 20));
}

TEST(Repair, FilesThatItReadsDoNotAllStayOpen) {
  const engine::Opened opened = with_copies(400);
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path());
  storage->directories()->make("");
  for (const std::string& name : opened.metadata.files) {
    put_file(*storage, name, ByteView(pattern_bytes(4)));
  }
  const FilesLeft few(60);
  engine::FileMaker maker(*storage, opened, all_files(opened));
  size_t bytes = 0;
  for (const uint32_t file : all_files(opened)) {
    maker.each_block({file, 0, 4}, [&](ByteView block) { bytes += block.size(); });
  }
  EXPECT_EQ(bytes, 1600u);
}

TEST(Repair, WhereNothingIsToBeMendedItWritesNothing) {
  FileImage without_manifest = damaged(saved(), "a");
  std::erase_if(without_manifest, [](const auto& f) { return f.first.ends_with(".manifest"); });
  for (const FileImage& image : {saved(), without_manifest, FileImage{}}) {
    uint64_t changes = 0;
    const auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
      changes += changes_storage(call.op) ? 1 : 0;
      return FaultAction::pass();
    });
    const std::string failed = failures(1, [&](Communicator) {
      const RepairReport report = repair(Location(disk->storage()));
      EXPECT_THAT(report.mended, IsEmpty());
      EXPECT_EQ(report.now.ok(), image != without_manifest);
    })[0];
    EXPECT_EQ(failed.empty(), !image.empty()) << failed;
    EXPECT_EQ(changes, 0u);
  }
}

TEST(Repair, ACheckpointThatIsReplacedBeforeTheLockIsVerifiedAgain) {
  const auto storage = memory_storage(damaged(saved(), "a"));
  bool replaced = false;
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    if (call.op == StorageOp::kLock && !std::exchange(replaced, true)) save_to(storage);
    return FaultAction::pass();
  });
  const RepairReport report = repair(Location(disk->storage()));
  EXPECT_TRUE(replaced);
  EXPECT_THAT(report.mended, IsEmpty());
  EXPECT_TRUE(report.now.ok());
}

// The first repair ends before the second one takes the lock.
TEST(Repair, TheSecondOfTwoReportsNoDamageThatTheFirstHasMended) {
  const FileImage whole = saved();
  const std::string file = file_of(whole, 1);
  FileImage missing = whole, longer = whole, cut = whole;
  missing.erase(file);
  longer[file].resize(longer[file].size() + 100, std::byte{7});
  cut[file].resize(cut[file].size() / 2);
  for (const FileImage& image : {damaged(whole, "a"), missing, longer, cut}) {
    const auto storage = memory_storage(image);
    bool first = false;
    const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
      if (call.op == StorageOp::kLock && !std::exchange(first, true)) {
        EXPECT_THAT(repair(Location(storage)).mended, Not(IsEmpty()));
      }
      return FaultAction::pass();
    });
    const RepairReport report = repair(Location(disk->storage()));
    EXPECT_TRUE(first);
    EXPECT_THAT(report.mended, IsEmpty());
    EXPECT_TRUE(report.now.ok());
    EXPECT_EQ(memory_image(*storage).at(file), whole.at(file));
  }
}

TEST(Repair, ProgressIsReportedWhileFilesAreWritten) {
  const FileImage whole = saved();
  const auto storage = memory_storage(damaged(whole, "a"));
  std::map<std::string, std::pair<uint64_t, uint64_t>> last;  // bytes done and in all, by phase
  repair(Location(storage), {}, [&](const Progress& progress) {
    last[std::string(progress.phase)] = {progress.bytes_done, progress.bytes_total};
  });
  const uint64_t size = whole.at(item_of(memory_storage(whole), "a").second).size();
  EXPECT_EQ(last.at("repair"), std::pair(size, size));
  EXPECT_EQ(last.at("verify").first, last.at("verify").second);
}

TEST(Repair, WhatReadsOtherwiseASecondTimeIsNotPutInTheFilesPlace) {
  const TempDirectory directory;
  const auto inner = posix_storage(directory.path());
  save_to(inner);
  const auto [at, file] = item_of(inner, "a");
  const auto flip = [&](const std::string& name, uint64_t offset) {
    std::fstream stream(directory.path() + "/" + name,
                        std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    const int byte = stream.get();
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.put(static_cast<char>(byte ^ 4));
  };
  flip(file, at.offset + at.length / 2);
  const auto damages = Checkpoint::open(Location(inner)).verify().damages;
  ASSERT_THAT(damages, SizeIs(1));
  const std::string source = damages[0].intact_in;
  const Metadata metadata = Checkpoint::open(Location(inner)).metadata();
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (call.op != StorageOp::kCreate || !call.name.ends_with(".repair.tmp")) {
      return FaultAction::pass();
    }
    for (const StoredCopy& copy : metadata.copies) {
      const bool is_source =
          metadata.tensors[copy.tensor].key == "a" && metadata.files[copy.at.file] == source;
      if (is_source) flip(source, copy.at.offset + copy.at.length / 2);
    }
    return FaultAction::pass();
  });
  const Bytes before = read_file(*inner, file, UINT64_MAX);
  const std::string failed =
      failures(1, [&](Communicator) { repair(Location(disk->storage())); })[0];
  EXPECT_THAT(failed, AllOf(HasSubstr("key a"), HasSubstr(file), HasSubstr("a second time")));
  EXPECT_EQ(read_file(*inner, file, UINT64_MAX), before);
  EXPECT_THAT(inner->list(".tilestone/"), SizeIs(2)) << "lock and manifest";
}

TEST(Repair, AnInterruptEndsItAndItsFilesGo) {
  const FileImage image = damaged(saved(), "a");
  const auto storage = memory_storage(image);
  const auto interrupt = std::make_shared<Interrupt>();
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    if (call.op == StorageOp::kCreate && call.name.ends_with(".repair.tmp")) {
      interrupt->request(std::make_exception_ptr(std::runtime_error("enough")));
    }
    return FaultAction::pass();
  });
  OpenOptions options;
  options.interrupt = interrupt;
  EXPECT_THROW(repair(Location(disk->storage()), options), std::runtime_error);
  EXPECT_TRUE(interrupt->requested());
  EXPECT_EQ(memory_image(*storage), image);
}

TEST(Repair, WhatAKilledOneHasLeftGoesWithTheNext) {
  const Quiet quiet;
  const FileImage image = saved();
  const auto storage = memory_storage(damaged(image, "a"));
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    const bool last = call.op == StorageOp::kRename && call.name.ends_with(".repair.tmp");
    return last && call.client == 0 ? FaultAction::die() : FaultAction::pass();
  });
  EXPECT_THROW(repair(Location(disk->storage(0))), Error);
  EXPECT_THAT(storage->list(".tilestone/"), SizeIs(5)) << "also the temporary file, note and mark";
  EXPECT_TRUE(repair(Location(disk->storage(1))).now.ok());
  EXPECT_EQ(memory_image(*storage), image);
}

TEST(Repair, AMissingFileIsReportedAndMendedThoughKeysWereRemoved) {
  const auto storage = memory_storage();
  save_to(storage, false, megatron_dialect());
  remove_keys(Location(storage), "a");
  const std::string file = file_of(*storage, 1);
  storage->remove(file);
  const auto damages = Checkpoint::open(Location(storage)).verify().damages;
  ASSERT_THAT(damages, Not(IsEmpty()));
  EXPECT_EQ(damages[0].file, file);
  EXPECT_THAT(damages[0].problem, HasSubstr("the file is missing"));
  EXPECT_TRUE(repair(Location(storage)).now.ok());
  EXPECT_TRUE(storage->stat(file));
}

// Bytes of removed items mean nothing: what the disk can't read of them is replaced by zeros, also
// beside a damaged item.
TEST(Repair, UnreadableBytesOfRemovedItemsAreReplacedByZeros) {
  const auto whole = memory_storage();
  save_to(whole, false, megatron_dialect());
  const auto [removed_at, name] = item_of(whole, "a");
  const ItemLocation removed = removed_at;  // lambdas capture no structured bindings
  const std::string file = name;
  remove_keys(Location(whole), "a");
  const FileImage image = memory_image(*whole);
  const auto beside = std::find_if(std::begin(kKeys) + 1, std::end(kKeys), [&](const char* key) {
    return item_of(whole, key).second == file;
  });
  ASSERT_NE(beside, std::end(kKeys));
  for (const FileImage& one : {image, damaged(image, *beside)}) {
    std::atomic<bool> is_bad = true;
    const uint64_t sector = removed.offset + removed.length / 2;
    const auto disk = FaultDisk::create(memory_storage(one), [&](const StorageCall& call) {
      if (call.op == StorageOp::kRename && call.to == file) is_bad = false;
      const bool hit = is_bad && call.op == StorageOp::kRead && call.name == file &&
                       call.offset <= sector && sector < call.offset + call.size;
      return hit ? FaultAction::fail(EIO) : FaultAction::pass();
    });
    EXPECT_FALSE(Checkpoint::open(Location(disk->storage())).verify().ok());
    EXPECT_TRUE(repair(Location(disk->storage())).now.ok());
  }
}

TEST(Repair, TheRestOfAnItemThatIsCutIsNotCalledAGap) {
  FileImage image = saved(true);
  const auto [at, file] = item_of(memory_storage(image), "w");
  image[file].resize(at.offset + at.length - 4);
  const auto damages = Checkpoint::open(Location(memory_storage(image))).verify().damages;
  std::vector<std::string> with_lost;
  for (const Damage& damage : damages) {
    EXPECT_THAT(damage.problem, Not(HasSubstr("belong to no item"))) << damage.offset;
    if (damage.problem.find("without an intact copy: w") != std::string::npos) {
      with_lost.push_back(damage.problem);
    }
  }
  EXPECT_THAT(with_lost, ElementsAre(HasSubstr("its save wrote")));
}

TEST(Repair, EachItemOfAFileThatIsCutIsSaidToBeMendedFromItsOwnSource) {
  const FileImage image = saved();
  std::set<std::string> sources;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const size_t part : {2, 10}) {
      FileImage cut = image;
      const std::string file = file_of(image, rank);
      cut[file].resize(cut[file].size() / part);
      const auto storage = memory_storage(cut);
      const auto texts = [](const std::vector<Damage>& damages) {
        std::vector<std::string> all;
        for (const Damage& damage : damages) all.push_back(damage.key + " " + damage.intact_in);
        return all;
      };
      const auto damages = Checkpoint::open(Location(storage)).verify().damages;
      EXPECT_GE(damages.size(), 3u);
      for (const Damage& damage : damages) sources.insert(damage.intact_in);
      const RepairReport report = repair(Location(storage));
      EXPECT_THAT(texts(report.mended), ElementsAreArray(texts(damages)));
      EXPECT_TRUE(report.now.ok());
      EXPECT_EQ(memory_image(*storage).at(file), image.at(file));
    }
  }
  EXPECT_GE(sources.size(), 3u) << "all have one source";
}

TEST(Repair, TensorsWithoutElementsAreEncodedAnewBecauseTheyHaveNoCopies) {
  const auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    StateDict state;
    for (const char* key : {"a", "empty"}) {
      const TensorView data = counting(DType::kFloat32, {key[0] == 'a' ? 1000 : 0, 4});
      ShardedTensor tensor = ShardedTensor::from_rank_offsets(key, data, {}, {comm.rank()});
      tensor.holders = {0, 1};
      state[key] = tensor;
    }
    SaveOptions options;
    options.comm = comm;
    options.copies.emplace();
    options.copies->group = {0, 1};
    save(state, Location(storage), options);
  });
  const FileImage image = memory_image(*storage);
  for (int rank = 0; rank < 2; ++rank) {
    FileImage lacking = image;
    lacking.erase(file_of(image, rank));
    FileImage flipped = image;
    for (std::byte& byte : flipped[file_of(image, rank)]) byte ^= std::byte{1};
    for (const FileImage& bad : {lacking, flipped}) {
      const auto damaged = memory_storage(bad);
      const VerifyReport found = Checkpoint::open(Location(damaged)).verify();
      EXPECT_FALSE(found.ok());
      for (const Damage& damage : found.damages) {
        EXPECT_THAT(damage.problem, Not(HasSubstr("without an intact copy")));
      }
      EXPECT_TRUE(repair(Location(damaged)).now.ok()) << rank;
      EXPECT_EQ(memory_image(*damaged), image) << rank;
    }
  }
}

// A common state as programs have it: some of it is shared, within it and with the program.
Value common_of(const Value& program) {
  const Value betas = Value::tuple({Value(0.9), Value(0.95)});
  const Value tensor = Value(counting(DType::kFloat32, {5}, 3));
  return Value::dict({{"a", betas},
                      {"b", Value::list({betas, tensor, tensor})},
                      {"program", program},
                      {"text", "one"},
                      {"raw", Value(to_bytes("bytes"))}});
}

FileImage saved_with_common(bool files, const Value& program) {
  const auto storage = memory_storage();
  const auto save_rank = [&](int rank, SaveOptions options) {
    StateDict state;
    const TensorView data = counting(DType::kFloat32, {1000});
    ShardedTensor tensor = ShardedTensor::from_rank_offsets("a", data, {}, {rank});
    tensor.holders = {0, 1};
    state["a"] = tensor;
    state["common"] = common_of(program);
    options.dialect = megatron_dialect();
    options.copies.emplace();
    options.copies->group = {0, 1};
    save(state, Location(storage), options);
  };
  if (files) {
    for (const int rank : {0, 1}) save_rank(rank, by_files(rank, 2));
  } else {
    run_ranks(2, [&](Communicator comm) {
      SaveOptions options;
      options.comm = comm;
      save_rank(comm.rank(), options);
    });
  }
  return memory_image(*storage);
}

TEST(Repair, TheCommonStateIsEncodedAnewByteForByteFromItsFile) {
  const Value program = Value::dict({{"lr", Value(0.1)}, {"schedule", Value::list({1, 2})}});
  const Value kept = program.as_dict()[1].second;  // the program shares a part of it
  for (const bool files : {false, true}) {
    const FileImage image = saved_with_common(files, program);
    for (int rank = 0; rank < 2; ++rank) {
      const std::string file = file_of(image, rank);
      FileImage lacking = image, flipped = image;
      lacking.erase(file);
      for (std::byte& byte : flipped[file]) byte ^= std::byte{1};
      for (const FileImage& bad : {lacking, flipped}) {
        const auto damaged = memory_storage(bad);
        for (const Damage& damage : Checkpoint::open(Location(damaged)).verify().damages) {
          EXPECT_THAT(damage.problem, Not(HasSubstr("without an intact copy"))) << rank;
        }
        const RepairReport report = repair(Location(damaged));
        EXPECT_TRUE(report.now.ok()) << rank << " " << files;
        EXPECT_EQ(memory_image(*damaged).at(file), image.at(file)) << rank << " " << files;
      }
    }
  }
}

TEST(Repair, AnItemThatItsSaveWroteInOtherBytesIsNotEncodedAnew) {
  const auto storage = memory_storage(saved_with_common(false, Value(1)));
  engine::Found found = engine::find_checkpoint(storage, nullptr);
  engine::Opened opened = engine::open_description(std::move(found.description), nullptr);
  ASSERT_TRUE(opened.common);
  EXPECT_TRUE(engine::FromIndex(opened).common(opened.common->at));
  ItemLocation other = opened.common->at;
  other.checksums->item_crc32 ^= 1;
  EXPECT_FALSE(engine::FromIndex(opened).common(other));
  opened.files.contents.erase("common.pt");
  EXPECT_FALSE(engine::FromIndex(opened).common(opened.common->at));
}

TEST(Repair, ANewFileHasThePermissionsOfTheOldOneOrOfAnother) {
  for (const bool missing : {false, true}) {
    TempDirectory directory;
    const auto storage = posix_storage(directory.path());
    save_to(storage);
    for (const std::string& name : storage->list()) {
      if (name.ends_with(".distcp"))
        fs::permissions(directory.path() + "/" + name, fs::perms(0600));
    }
    const std::string path = directory.path() + "/" + file_of(*storage, 1);
    if (missing) {
      fs::remove(path);
    } else {
      fs::permissions(path, fs::perms(0440));
      fs::resize_file(path, fs::file_size(path) / 2);
    }
    EXPECT_TRUE(repair(Location(storage)).now.ok());
    EXPECT_EQ(fs::status(path).permissions(), fs::perms(missing ? 0600 : 0440));
  }
}

// An index that names files outside the directory, or the like, is unsafe, damaged or not.
TEST(Repair, AFlippedBitOfTheIndexIsCorruptOrUnsafeWhateverParsingMakesOfIt) {
  const FileImage image = saved();
  for (size_t at = 0; at < image.at(".metadata").size(); ++at) {
    FileImage flipped = image;
    flipped[".metadata"][at] ^= std::byte{1};
    try {
      EXPECT_FALSE(Checkpoint::open(Location(memory_storage(flipped))).verify().ok()) << at;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kUnsafe) continue;
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << at << " " << error.what();
      EXPECT_EQ(error.file(), ".metadata") << at;
    }
  }
}

}  // namespace tilestone::repair_test
