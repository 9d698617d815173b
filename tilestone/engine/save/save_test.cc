#include "tilestone/engine/save/save.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "tilestone/base/uuid.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/format/safetensors/safetensors.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::save_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

SaveOptions saving(const Communicator& comm) {
  SaveOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.timeout = 60;
  return options;
}

LoadOptions loading(const Communicator& comm) {
  LoadOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.timeout = 60;
  options.resources.threads = 2;
  return options;
}

std::vector<std::string> names_with(Storage& storage, const std::string& part) {
  std::vector<std::string> found;
  for (std::string& name : storage.list()) {
    if (name.find(part) != std::string::npos) found.push_back(std::move(name));
  }
  return found;
}

void save_rows(const Location& location, int ranks, int64_t first, bool overwrite = false) {
  run_ranks(ranks, [&](Communicator comm) {
    SaveOptions options = saving(comm);
    options.overwrite = overwrite;
    save(row_state(comm, first), location, options);
  });
}

TEST(Save, WhatFourRanksSaveThreeLoad) {
  const Location location(memory_storage());
  save_rows(location, 4, 100);
  expect_rows(location, 100, 4);
  run_ranks(3, [&](Communicator comm) {
    StateDict wanted;
    const int64_t begin = comm.rank() * 3, count = comm.rank() == 2 ? 2 : 3;
    wanted["w"] =
        ShardedTensor::from_box("w", TensorView::without_data(DType::kFloat32, {4, count}), {4, 8},
                                {{0, begin}, {4, count}});
    wanted["step"] = nullptr;
    const StateDict loaded = load(wanted, location, loading(comm));
    const TensorView all = counting(DType::kFloat32, {4, 8}, 100);
    EXPECT_EQ(elements(loaded.find("w")->get_if<ShardedTensor>()->data),
              elements(all.narrow({{0, begin}, {4, count}})));
    EXPECT_EQ(*loaded.find("step")->get_if<Value>(), Value(int64_t{100}));
  });
}

TEST(Save, TensorsWithDataAreFilledInPlace) {
  const Location location(memory_storage());
  save_rows(location, 1, 7);
  StateDict wanted;
  const TensorView mine = TensorView::allocate(DType::kInt64, {3});
  wanted["p"] = mine;
  load(wanted, location);
  EXPECT_EQ(elements(mine), elements(counting(DType::kInt64, {3}, 7)));
}

TEST(Save, ReplicatedTensorsAreWrittenOnceAndCountedInTheResult) {
  const Location location(memory_storage());
  std::vector<SaveResult> results(3);
  run_ranks(3, [&](Communicator comm) {
    results[static_cast<size_t>(comm.rank())] = save(row_state(comm, 1), location, saving(comm));
  });
  uint64_t items = 0, bytes = 0, stored = 0;
  for (const SaveResult& result : results) {
    EXPECT_EQ(result.save_id, results[0].save_id);
    items += result.items_written;
    bytes += result.bytes_written;
  }
  EXPECT_EQ(items, 5u);  // three rows, "p", "step"
  for (const std::string& name : names_with(location.storage(), ".distcp")) {
    stored += location.storage().stat(name)->size;
  }
  EXPECT_EQ(bytes, stored);
}

// A disk that records the sizes of appends to data files.
std::shared_ptr<FaultDisk> noting_appends(const std::shared_ptr<Storage>& inner,
                                          const std::function<void(uint64_t)>& note) {
  return FaultDisk::create(inner, [note](const StorageCall& call) {
    if (call.op == StorageOp::kAppend && call.name.ends_with(".distcp")) note(call.size);
    return FaultAction::pass();
  });
}

constexpr uint64_t kMiB = 1u << 20;  // the pool of saving(): no buffer is larger

TEST(Save, LargeContiguousTensorsAreWrittenFromWhereTheyLie) {
  const TensorView tensor = counting(DType::kFloat32, {3, 1 << 19});  // 6 MiB
  const TensorView columns = tensor.narrow({{0, 0}, {3, (1 << 19) - 8}});
  for (const bool contiguous : {true, false}) {
    const auto storage = memory_storage();
    uint64_t largest = 0;
    const auto disk =
        noting_appends(storage, [&](uint64_t size) { largest = std::max(largest, size); });
    StateDict state;
    state["t"] = contiguous ? tensor : columns;
    save(state, Location(disk->storage()), saving(solo()));
    if (contiguous) {
      EXPECT_GT(largest, 5 * kMiB);
    } else {
      EXPECT_LE(largest, kMiB);
    }
    const Checkpoint saved = Checkpoint::open(Location(storage));
    EXPECT_TRUE(saved.verify().ok());
    EXPECT_EQ(elements(saved.read("t")), elements(contiguous ? tensor : columns));
  }
}

TEST(Save, TheDeadlineIsKeptInTheMiddleOfALargeTensor) {
  constexpr double kSeconds = 1.5;  // enough for what comes before the tensor
  int blocks = 0;
  const auto disk = noting_appends(memory_storage(), [&](uint64_t size) {
    if (size < kMiB) return;
    ++blocks;
    std::this_thread::sleep_for(std::chrono::duration<double>(kSeconds));
  });
  StateDict state;
  state["t"] = counting(DType::kUInt8, {64 << 20});
  SaveOptions options = saving(solo());
  options.timeout = kSeconds;
  expect_error([&] { save(state, Location(disk->storage()), options); }, ErrorCode::kTimeout,
               "while writing");
  EXPECT_LT(blocks, 4);  // of eight blocks
}

TEST(Save, AnExistingCheckpointIsNotReplacedUnlessRequested) {
  const Location location(memory_storage());
  save_rows(location, 2, 1);
  const auto texts =
      failures(2, [&](Communicator comm) { save(row_state(comm, 2), location, saving(comm)); });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("a checkpoint exists at memory"),
                                HasSubstr("overwrite = true"))));
  expect_rows(location, 1, 2);
  save_rows(location, 3, 2, true);
  expect_rows(location, 2, 3);
}

// Another writer, which knows nothing of locks, publishes in the middle of a save.
TEST(Save, AMetadataFileThatAppearsMeanwhileIsNotReplaced) {
  const auto storage = memory_storage();
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    if (call.op == StorageOp::kRename && call.to == ".metadata") {
      put_file(*storage, ".metadata", as_bytes("another writer's"));
    }
    return FaultAction::pass();
  });
  expect_error([&] { save(row_state(solo(), 1), Location(disk->storage()), saving(solo())); },
               ErrorCode::kAlreadyExists, ".metadata");
  EXPECT_EQ(as_text(read_file(*storage, ".metadata", 100)), "another writer's");
  EXPECT_THAT(storage->list(), testing::ElementsAre(".metadata"));  // the answer was definite
}

TEST(Save, ADirectoryWithTheNameOfTheMetadataIsRefusedBeforeAnythingIsWritten) {
  for (const std::string name : {".metadata", "__1.metadata"}) {
    const TempDirectory folder;
    const auto storage = posix_storage(folder.path());
    storage->directories()->make(name);
    expect_error([&] { save(row_state(solo(), 3), storage); }, ErrorCode::kUnsupported, name);
    EXPECT_THAT(storage->list(), IsEmpty());
  }
}

TEST(Save, OverwritingRemovesTheOldFilesAndNothingElse) {
  const auto storage = memory_storage({{"notes.txt", to_bytes("mine")},
                                       {"__0_0.distcp", to_bytes("not of this checkpoint")},
                                       {".tilestone/other", to_bytes("unknown")}});
  const Location location(storage);
  save_rows(location, 3, 1);
  const auto old = names_with(*storage, "-");
  ASSERT_EQ(old.size(), 4u);
  save_rows(location, 2, 2, true);
  for (const std::string& name : old) EXPECT_FALSE(storage->stat(name)) << name;
  EXPECT_EQ(names_with(*storage, ".distcp").size(), 3u);
  EXPECT_EQ(names_with(*storage, ".manifest").size(), 1u);
  EXPECT_TRUE(storage->stat("notes.txt"));
  EXPECT_TRUE(storage->stat("__0_0.distcp"));
  EXPECT_TRUE(storage->stat(".tilestone/other"));
  expect_rows(location, 2, 2);
}

TEST(Save, FilesOfFailedAttemptsAreRemovedByTheNextSave) {
  const auto storage = memory_storage();
  const std::string dead = random_uuid();
  for (const std::string& name : {dead + "__0_0.distcp", dead + "__17_2.distcp",
                                  engine::temporary_name(dead, "metadata"), manifest_name(dead)}) {
    storage->directories()->make(".tilestone");
    storage->create(name)->close();
  }
  save_rows(Location(storage), 2, 1);
  EXPECT_TRUE(names_with(*storage, dead).empty());
  expect_rows(Location(storage), 1, 2);
}

std::vector<std::string> names_of(const std::vector<StepTime>& timings) {
  std::vector<std::string> names;
  for (const StepTime& step : timings) {
    EXPECT_GE(step.seconds, 0) << step.step;
    names.push_back(step.step);
  }
  return names;
}

// Collects what is logged while it exists.
class Logged {
 public:
  Logged() : before_(set_log_level(LogLevel::kDebug)) {
    set_log_sink([this](LogLevel level, std::string_view text) {
      (level == LogLevel::kInfo ? info : others).emplace_back(text);
    });
  }
  ~Logged() {
    set_log_sink({});
    set_log_level(before_);
  }
  std::vector<std::string> info, others;

 private:
  const LogLevel before_;
};

TEST(Save, TheStepsTimesAreInTheResultInTheReportsAndInOneLineOfTheLog) {
  const Location location(memory_storage());
  std::vector<SaveResult> results(2);
  const Logged logged;
  run_ranks(2, [&](Communicator comm) {
    results[static_cast<size_t>(comm.rank())] = save(row_state(comm, 1), location, saving(comm));
  });
  for (const SaveResult& result : results) {
    EXPECT_THAT(names_of(result.timings),
                testing::ElementsAre("planning", "writing", "reporting", "publishing"));
  }
  ASSERT_EQ(logged.info.size(), 1u);
  EXPECT_THAT(logged.info[0],
              AllOf(testing::StartsWith("saved memory: "), HasSubstr(" on 2 ranks in "),
                    HasSubstr("/s (planning "), HasSubstr(" s, writing "),
                    HasSubstr(" s, reporting "), HasSubstr(" s, publishing ")));
  EXPECT_THAT(logged.others, testing::Contains(AllOf(HasSubstr(results[1].save_id + ", rank 1"),
                                                     HasSubstr("writing took"))));
  const std::string name = manifest_name(results[0].save_id);
  const Manifest manifest = Manifest::decode(read_file(location.storage(), name, UINT64_MAX), name);
  for (const Receipt& receipt : manifest.receipts) {
    ASSERT_EQ(receipt.steps.size(), 2u);
    EXPECT_EQ(receipt.steps[0].name, "planning");
    EXPECT_EQ(receipt.steps[1].name, "writing");
    EXPECT_GE(receipt.steps[1].began + 1000,
              receipt.steps[0].began + receipt.steps[0].microseconds);
  }
}

TEST(Load, TheStepsTimesAreInTheReportAndInOneLineOfTheLog) {
  const Location location(memory_storage());
  save_rows(location, 2, 1);
  std::vector<LoadReport> reports(2);
  const Logged logged;
  run_ranks(2, [&](Communicator comm) {
    LoadOptions options = loading(comm);
    options.differences.report = &reports[static_cast<size_t>(comm.rank())];
    load(row_template(comm), location, options);
  });
  for (const LoadReport& report : reports) {
    EXPECT_THAT(names_of(report.timings),
                testing::ElementsAre("describing", "choosing", "exchanging", "reading"));
    EXPECT_GT(report.bytes_loaded, 0u);
  }
  ASSERT_EQ(logged.info.size(), 1u);
  EXPECT_THAT(logged.info[0], testing::StartsWith("loaded memory"));
  EXPECT_THAT(logged.info[0],
              HasSubstr(std::to_string(reports[0].bytes_loaded + reports[1].bytes_loaded) +
                        " B on 2 ranks in "));
}

TEST(Save, TwoSaversAtOnceOneGetsAClearError) {
  const Location location(memory_storage());
  bool second_was_refused = false;
  SaveOptions first;
  first.progress = [&](const Progress&) {
    if (second_was_refused) return;
    try {
      save(row_state(solo(), 2), location);
    } catch (const Error& error) {
      second_was_refused = true;
      EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists);
      EXPECT_THAT(error.what(), HasSubstr("another save is under way at memory"));
    }
  };
  save(row_state(solo(), 1), location, first);
  EXPECT_TRUE(second_was_refused);
  expect_rows(location, 1, 1);
}

TEST(Save, WeightsChangedBetweenSavesAreSavedAsTheyAreThen) {
  const TensorView weights = counting(DType::kFloat32, {64}, 0);
  StateDict state;
  state["w"] = weights;
  const Location first(memory_storage()), second(memory_storage());
  save(state, first);
  const Bytes before = elements(weights);
  weights.data[5] = std::byte{77};
  save(state, second);
  EXPECT_EQ(elements(Checkpoint::open(first).read("w")), before);
  EXPECT_EQ(elements(Checkpoint::open(second).read("w")), elements(weights));
}

TEST(Save, SaveLoadChangeSaveLoadKeepsBothStates) {
  const Location a(memory_storage()), b(memory_storage());
  save_rows(a, 2, 5);
  run_ranks(2, [&](Communicator comm) {
    StateDict state = load(row_template(comm), a, loading(comm));
    TensorView& w = state.find("w")->get_if<ShardedTensor>()->data;
    EXPECT_EQ(elements(w), elements(counting(DType::kFloat32, {1, 8}, 5 + 8 * comm.rank())));
    const TensorView next = counting(DType::kFloat32, {1, 8}, 9 + 8 * comm.rank());
    strided_copy(w.strided_view(), next.strided_view());
    const TensorView plain = counting(DType::kInt64, {3}, 9);
    strided_copy(state.find("p")->get_if<TensorView>()->strided_view(), plain.strided_view());
    state["step"] = int64_t{9};
    save(state, b, saving(comm));
  });
  expect_rows(a, 5, 2);
  expect_rows(b, 9, 2);
}

TEST(Save, OverTheCheckpointThatOneReadsFrom) {
  const TempDirectory directory;
  const Location location(directory.path());
  save_rows(location, 2, 1);
  const Checkpoint reading = Checkpoint::open(location);
  run_ranks(2, [&](Communicator comm) {
    StateDict state = load(row_template(comm), location, loading(comm));
    SaveOptions options = saving(comm);
    options.overwrite = true;
    save(state, location, options);
  });
  expect_rows(location, 1, 2);
  try {  // the old files are gone: this must be an error, never other bytes
    EXPECT_EQ(elements(reading.read("p")), elements(counting(DType::kInt64, {3}, 1)));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  }
}

TEST(Save, SeveralFilesARankShareTheBytes) {
  const Location location(memory_storage());
  StateDict state;
  for (int i = 0; i < 12; ++i) state[std::to_string(i)] = counting(DType::kFloat32, {1000}, i);
  state["note"] = "text";
  SaveOptions options;
  options.resources.files_per_rank = 4;
  save(state, location, options);
  const auto files = names_with(location.storage(), ".distcp");
  ASSERT_EQ(files.size(), 4u);
  for (const std::string& name : files) {
    EXPECT_GT(location.storage().stat(name)->size, 12000u) << name;
  }
  EXPECT_EQ(elements(Checkpoint::open(location).read("7")),
            elements(counting(DType::kFloat32, {1000}, 7)));
}

TEST(Save, KeysThatBeginWithTheSeparationHintHaveFilesOfTheirOwn) {
  const Location location(memory_storage());
  StateDict state;
  for (int i = 0; i < 6; ++i) {
    state["a" + std::to_string(i)] = counting(DType::kFloat32, {1000}, i);
    state["b" + std::to_string(i)] = counting(DType::kFloat32, {1000}, i);
  }
  state["ab"] = "text";
  SaveOptions options;
  options.separation_hint = "a";
  options.overwrite = true;
  options.resources.files_per_rank = 2;
  const auto is_separate = [](const std::string& name) { return name.size() == 37 + 12; };
  std::set<std::string> copies;              // made by the user
  for (int again = 0; again < 2; ++again) {  // the second save removes the first one's files
    save(state, location, options);
    auto files = names_with(location.storage(), ".distcp");
    for (const std::string& copy : copies) EXPECT_EQ(std::erase(files, copy), 1u) << copy;
    ASSERT_EQ(files.size(), 4u);
    for (const std::string& file : files) {
      location.storage().create("copy-" + file)->close();
      copies.insert("copy-" + file);
    }
    ASSERT_EQ(std::count_if(files.begin(), files.end(), is_separate), 2);
    const Checkpoint checkpoint = Checkpoint::open(location);
    for (const StoredTensor& tensor : checkpoint.metadata().tensors) {
      const std::string& file = checkpoint.metadata().files[tensor.chunks.front().at.file];
      EXPECT_EQ(is_separate(file), tensor.key[0] == 'a') << tensor.key << " in " << file;
      EXPECT_EQ(checkpoint.rank_of_file(file), 0);
    }
    EXPECT_EQ(elements(checkpoint.read("a3")), elements(counting(DType::kFloat32, {1000}, 3)));
  }
  // Also if the metadata of the checkpoint that is replaced can't be read.
  {
    location.storage().remove(".metadata");
    const auto damaged = location.storage().create(".metadata");
    damaged->append(to_bytes("damaged"));
    damaged->close();
  }
  save(state, location, options);
  EXPECT_EQ(names_with(location.storage(), ".distcp").size(), 4 + copies.size());
  for (const auto& hint : {"a/b", ".a", "a\n"}) {
    options.separation_hint = hint;
    expect_error([&] { save(state, location, options); }, ErrorCode::kInvalidArgument,
                 "begin a file's name");
  }
  options.separation_hint = "a";
  options.format = safetensors_format();
  expect_error([&] { save(state, location, options); }, ErrorCode::kUnsupported,
               "needs the format");
}

TEST(Save, ProgressEndsWithAllBytesAndAnExceptionEndsTheSave) {
  const Location location(memory_storage());
  std::vector<uint64_t> done;
  SaveOptions options;
  options.progress = [&](const Progress& p) {
    EXPECT_EQ(p.phase, "write");
    done.push_back(p.bytes_done);
  };
  save(row_state(solo(), 1), location, options);
  ASSERT_FALSE(done.empty());
  EXPECT_GE(done.back(), 8u * 4 + 3 * 8);
  options.overwrite = true;
  options.progress = [](const Progress&) {
    throw Error(ErrorCode::kInvalidArgument, "stopped by the user");
  };
  EXPECT_THROW(save(row_state(solo(), 2), location, options), Error);
  expect_rows(location, 1, 1);
}

TEST(Save, MemoryAboveTheTensorsIsTheBufferPool) {
  const Location location(memory_storage());
  StateDict state;
  state["w"] = counting(DType::kFloat32, {1 << 20});
  SaveOptions options;
  options.resources.buffer_bytes = 1u << 20;  // a quarter of the tensor
  save(state, location, options);
  LoadOptions load_options;
  load_options.resources.buffer_bytes = 1u << 20;
  StateDict wanted;
  wanted["w"] = TensorView::without_data(DType::kFloat32, {1 << 20});
  const StateDict loaded = load(wanted, location, load_options);
  EXPECT_EQ(elements(*loaded.find("w")->get_if<TensorView>()),
            elements(*state.find("w")->get_if<TensorView>()));
}

TEST(Load, WhatIsNotThereIsNamedOnEveryRank) {
  const Location location(memory_storage());
  EXPECT_THAT(
      failures(2, [&](Communicator comm) { load(row_template(comm), location, loading(comm)); }),
      Each(HasSubstr("no checkpoint at memory")));
  save_rows(location, 2, 1);
  const auto texts = failures(3, [&](Communicator comm) {
    StateDict wanted;
    if (comm.rank() == 1) wanted["stepp"] = nullptr;
    load(wanted, location, loading(comm));
  });
  EXPECT_THAT(texts,
              Each(AllOf(HasSubstr("the object is not in the checkpoint"), HasSubstr("key stepp"),
                         HasSubstr("rank 1"), HasSubstr("similar keys: step"))));
}

TEST(Load, DamageIsFoundAndNamedOnEveryRank) {
  const auto storage = memory_storage();
  save_rows(Location(storage), 2, 1);
  FileImage image = memory_image(*storage);
  const StoredChunk chunk =
      Checkpoint::open(Location(storage)).metadata().find_tensor("w")->chunks[1];
  const std::string file = Checkpoint::open(Location(storage)).metadata().files[chunk.at.file];
  image[file][chunk.at.offset + chunk.at.checksums->payload_offset + 3] ^= std::byte{1};
  const Location damaged(memory_storage(image));
  const auto texts =
      failures(2, [&](Communicator comm) { load(row_template(comm), damaged, loading(comm)); });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("is damaged: expected CRC-32"), HasSubstr("key w"),
                                HasSubstr(file), HasSubstr("rank 1"))));
  run_ranks(2, [&](Communicator comm) {
    LoadOptions options = loading(comm);
    options.checks.checksums = false;
    load(row_template(comm), damaged, options);
  });
}

}  // namespace tilestone::save_test
