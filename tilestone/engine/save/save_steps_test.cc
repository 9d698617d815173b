// A save in steps: with a communicator and by files.
#include "tilestone/engine/save/save_steps_testing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "tilestone/base/sanitized_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::save_steps_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int64_t kFirst = 3;
// Elements: a tensor whose offset within a page matters.
constexpr int64_t kLarge = kSlowBytes ? 1 << 18 : 1 << 21;

// How the ranks coordinate.
enum class Way { kRounds, kFiles };

SaveOptions options_of(Way way, const Communicator& comm) {
  SaveOptions options;
  options.timeout = 20;
  options.resources.threads = 2;
  if (way == Way::kFiles) {
    options.by_files = ByFiles{comm.rank(), comm.size(), "a run of a test"};
  } else {
    options.comm = comm;
  }
  return options;
}

// The tensors of a state, in memory of the test, so that the test can change them.
struct Model {
  TensorView row, all, memory, large;
  StateDict state;

  explicit Model(const Communicator& comm)
      : row(counting(DType::kFloat32, {1, 8}, kFirst + 8 * comm.rank())),
        all(counting(DType::kInt64, {3}, kFirst)),
        memory(TensorView::allocate(DType::kFloat32, {kLarge + 2 * 1024})),
        large(off_a_page(memory)) {
    state["w"] = ShardedTensor::from_rank_offsets("w", row, {{0, comm.rank(), comm.size()}});
    ShardedTensor replica = ShardedTensor::from_rank_offsets("p", all, {}, {comm.rank()});
    for (int rank = 0; rank < comm.size(); ++rank) replica.holders.push_back(rank);
    state["p"] = replica;
    state["step"] = kFirst;
    const TensorView numbers = counting(DType::kFloat32, {kLarge}, comm.rank());
    std::memcpy(large.data, numbers.data, large.bytes());
    state["large"] =
        ShardedTensor::from_rank_offsets("large", large, {{0, comm.rank(), comm.size()}});
  }

  // Begins three elements after the beginning of a page: a program's tensors are rarely aligned to
  // pages.
  static TensorView off_a_page(const TensorView& memory) {
    const auto address = reinterpret_cast<uintptr_t>(memory.data);
    const auto first = static_cast<int64_t>((4096 - address % 4096) / sizeof(float)) + 3;
    return memory.narrow({{first}, {kLarge}});
  }

  void forget() {
    for (const TensorView& tensor : {row, all, large}) {
      std::memset(tensor.data, 0x55, tensor.bytes());
    }
    state = StateDict();
  }
};

void expect_saved(const Location& location, int ranks) {
  expect_rows(location, kFirst, ranks);
  const Checkpoint checkpoint = Checkpoint::open(location);
  for (int rank = 0; rank < ranks; ++rank) {
    const Box part = {{rank * kLarge}, {kLarge}};
    EXPECT_TRUE(same_bytes(elements(checkpoint.read("large").narrow(part)),
                           elements(counting(DType::kFloat32, {kLarge}, rank))));
  }
  EXPECT_TRUE(checkpoint.verify().ok());
  EXPECT_TRUE(find_leftovers(location).empty());
  EXPECT_TRUE(find_unpublished(location).empty());
}

// The contents of all data files, by rank.
std::vector<std::string> data_of(const std::shared_ptr<Storage>& storage) {
  std::vector<std::pair<std::string, std::string>> found;  // strings are compared as a whole
  for (const std::string& name : storage->list()) {
    if (!name.ends_with(".distcp")) continue;
    const Bytes bytes = read_file(*storage, name, UINT64_MAX);
    found.emplace_back(name.substr(name.find("__")),
                       std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> contents;
  for (auto& [name, content] : found) contents.push_back(std::move(content));
  return contents;
}

// Runs each rank on its own thread, with a communicator that knows its rank.
std::vector<std::string> each_rank(Way way, int ranks,
                                   const std::function<void(Communicator, SaveOptions)>& body) {
  return failures(ranks, [&](Communicator comm) { body(comm, options_of(way, comm)); });
}

TEST(SaveSteps, TakenApartTheyWriteTheFilesOfASaveAndWhatWasStagedIsSavedAsItWas) {
  for (const Way way : {Way::kRounds, Way::kFiles}) {
    std::vector<std::shared_ptr<Storage>> storages;
    for (const char* how : {"in a row", "live", "staged"}) {
      storages.push_back(memory_storage());
      const auto thrown = each_rank(way, 2, [&](const Communicator& comm, SaveOptions options) {
        Model model(comm);
        const bool stages = std::string(how) == "staged";
        if (std::string(how) == "in a row") {
          save(model.state, storages.back(), options);
          return;
        }
        SteppedSave planned = begin_save(model.state, storages.back(), options);
        options = {};
        const uint64_t bytes = planned.bytes();
        EXPECT_GE(bytes, sizeof(float) * (8 + kLarge));
        SteppedSave staged = stages ? planned.stage() : std::move(planned);
        if (stages) model.forget();
        EXPECT_EQ(staged.bytes(), bytes);
        SteppedSave written = staged.write();
        model.forget();
        SteppedSave reported = written.report();
        const SaveResult result = reported.publish();
        EXPECT_TRUE(result.published);
        EXPECT_GE(result.bytes_written, bytes);
      });
      EXPECT_THAT(thrown, Each(std::string()));
      expect_saved(storages.back(), 2);
    }
    EXPECT_EQ(data_of(storages[0]), data_of(storages[1]));
    EXPECT_EQ(data_of(storages[0]), data_of(storages[2]));
    if (way == Way::kFiles) {  // all names and bytes are equal
      EXPECT_EQ(memory_image(*storages[0]), memory_image(*storages[2]));
    }
  }
}

TEST(SaveSteps, TensorsInsideOfObjectsAreStagedToo) {
  for (const auto& dialect : {pytorch_dialect(), megatron_dialect()}) {
    const auto storage = memory_storage();
    const TensorView inner = counting(DType::kFloat32, {4}, kFirst);
    const Value shared = Value::tuple({Value(inner), Value("text")});
    const Value object = Value::list({Value(1), Value::dict({{"inner", shared}}), shared});
    StateDict state = row_state(solo(), kFirst);
    state["object"] = ShardedObject::make("object", object, {1}, {0});
    state["common"] = object;
    SaveOptions options = options_of(Way::kRounds, solo());
    options.dialect = dialect;
    SteppedSave staged = begin_save(state, storage, options).stage();
    std::memset(inner.data, 0, inner.bytes());
    staged.write().report().publish();
    const auto expect_inner = [&](const Value& found) {
      EXPECT_EQ(elements(found.items()[0].as_tensor()),
                elements(counting(DType::kFloat32, {4}, kFirst)));
      EXPECT_EQ(found.items()[1], Value("text"));
    };
    const Value found = Checkpoint::open(Location(storage)).read_object("object/shard_0_1");
    expect_inner(*found.items()[1].find("inner"));
    expect_inner(found.items()[2]);
    if (dialect->name() != megatron_dialect()->name()) continue;
    expect_inner(Checkpoint::open(Location(storage)).common()->find("common")->items()[2]);
  }
}

// Takes the first `steps` steps, then destroys the save.
void save_up_to(int steps, const StateDict& state, const Location& location,
                const SaveOptions& options) {
  SteppedSave planned = begin_save(state, location, options);
  if (steps == 0) return;
  SteppedSave staged = planned.stage();
  if (steps == 1) return;
  SteppedSave written = staged.write();
  if (steps == 2) return;
  SteppedSave reported = written.report();
  if (steps == 3) return;
  reported.publish();
}

TEST(SaveSteps, WithACommunicatorADroppedSaveEndsOnAllRanksAndLeavesNoCheckpointAndNoData) {
  for (const int dropper : {0, 1}) {
    for (int steps = 0; steps < 4; ++steps) {
      const auto storage = memory_storage();
      const auto texts = failures(2, [&](const Communicator& comm) {
        const StateDict state = row_state(comm, kFirst);
        const bool drops = comm.rank() == dropper;
        save_up_to(drops ? steps : 4, state, storage, options_of(Way::kRounds, comm));
        if (drops) throw Error(ErrorCode::kInternal, "dropped");
      });
      const char* const before[] = {"written", "written", "reported", "published"};
      EXPECT_THAT(texts[static_cast<size_t>(1 - dropper)],
                  AllOf(HasSubstr(std::string("gave up the save before it was ") + before[steps]),
                        HasSubstr("rank " + std::to_string(dropper))));
      // As in any save, a rank that has agreed to publish does not remove its files; the
      // coordinator's next save does.
      const bool agreed = steps == 3 && dropper == 0;
      for (const std::string& name : storage->list()) {
        EXPECT_TRUE(name.ends_with(".begun") || name == ".tilestone/lock" || agreed) << name;
      }
      EXPECT_THROW(Checkpoint::open(Location(storage)), Error);
      // The next save works.
      EXPECT_THAT(failures(2,
                           [&](const Communicator& comm) {
                             save(row_state(comm, 50), storage, options_of(Way::kRounds, comm));
                           }),
                  Each(std::string()));
      expect_rows(storage, 50, 2);
      EXPECT_TRUE(find_leftovers(Location(storage)).empty());
    }
  }
}

TEST(SaveSteps, AloneADroppedSaveLeavesNothing) {
  for (int steps = 0; steps < 4; ++steps) {
    const auto storage = memory_storage();
    save_up_to(steps, row_state(solo(), kFirst), storage, options_of(Way::kRounds, solo()));
    EXPECT_THAT(storage->list(), Each(std::string(".tilestone/lock"))) << steps;
  }
}

TEST(SaveSteps, ByFilesADroppedSaveEndsOnAllRanksAndTheNextNumberGoesOn) {
  for (int steps = 0; steps < 4; ++steps) {
    const auto storage = memory_storage();
    const auto texts = each_rank(Way::kFiles, 2, [&](const Communicator& comm, SaveOptions way) {
      const StateDict state = row_state(comm, kFirst);
      save_up_to(comm.rank() == 1 ? steps : 4, state, storage, way);
    });
    if (steps < 3) {
      EXPECT_THAT(texts[0], AllOf(HasSubstr("gave up the save before it was"), HasSubstr("rank 1")))
          << steps;
      for (const std::string& name : storage->list()) {
        EXPECT_FALSE(name.ends_with("__1_0.distcp")) << steps;
      }
      for (const int rank : {1, 0}) {
        SaveOptions again = options_of(Way::kFiles, solo());
        again.by_files->rank = rank;
        again.by_files->world_size = 2;
        again.by_files->number = 1;
        again.by_files->wait = rank == 0;
        save(row_state(threads(2)[static_cast<size_t>(rank)], kFirst), storage, again);
      }
      remove_leftovers(Location(storage));
    } else {
      EXPECT_EQ(texts[0], "");  // a reported save needs no other rank
    }
    expect_rows(storage, kFirst, 2);
    EXPECT_TRUE(find_leftovers(Location(storage)).empty());
  }
}

// A group in a save can't begin another one. A save that is destroyed lets the next one begin.
TEST(SaveSteps, ASecondSaveOfTheGroupIsRefusedWhileOneIsOnItsWay) {
  const auto storage = memory_storage();
  const auto texts = failures(2, [&](const Communicator& comm) {
    const StateDict state = row_state(comm, kFirst);
    SteppedSave planned = begin_save(state, storage, options_of(Way::kRounds, comm));
    expect_error([&] { save(state, storage, options_of(Way::kRounds, comm)); },
                 ErrorCode::kInvalidArgument, "the same group");
    planned.write().report().publish();
  });
  EXPECT_THAT(texts, Each(std::string()));
  expect_rows(storage, kFirst, 2);
}

TEST(SaveSteps, AWriteThatFailedOnOneRankIsReportedToAll) {
  for (const Way way : {Way::kRounds, Way::kFiles}) {
    const auto storage = memory_storage();
    const auto texts = each_rank(way, 2, [&](const Communicator& comm, SaveOptions options) {
      if (comm.rank() == 1) {
        options.progress = [](const Progress&) { throw Error(ErrorCode::kIo, "no disk"); };
      }
      const StateDict state = row_state(comm, kFirst);
      SteppedSave written = begin_save(state, storage, options).stage().write();  // does not throw
      written.report().publish();
    });
    EXPECT_THAT(texts, Each(HasSubstr("no disk"))) << static_cast<int>(way);
    EXPECT_THROW(Checkpoint::open(Location(storage)), Error);
  }
}

}  // namespace tilestone::save_steps_test
