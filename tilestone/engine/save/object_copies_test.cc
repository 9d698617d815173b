// Copies of objects that another rank writes, in a rank's own data file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/removal.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/session.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::object_copies_test {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

enum class Way { kExchange, kFiles };
constexpr Way kWays[] = {Way::kExchange, Way::kFiles};
constexpr int kRanks = 4;  // in two model-parallel groups, {0, 1} and {2, 3}

std::vector<int> group_of(int rank) { return {rank / 2 * 2, rank / 2 * 2 + 1}; }

Value config() { return Value::tuple({Value("lr"), Value(0.5)}); }

// "w" has a row on each rank; "norm" and "config" are on all ranks.
StateDict state_of(int rank, bool with_data = true) {
  const auto data = [&](const Dims& shape, int64_t first) {
    return with_data ? counting(DType::kFloat32, shape, first)
                     : TensorView::without_data(DType::kFloat32, shape);
  };
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets("w", data({1, 64}, 64 * rank), {{0, rank, kRanks}});
  ShardedTensor norm = ShardedTensor::from_rank_offsets("norm", data({64}, 7), {}, {rank});
  norm.holders = {0, 1, 2, 3};
  state["norm"] = norm;
  state["config"] = with_data ? config() : Value();
  return state;
}

SaveOptions saving(Way way, const Communicator& comm, bool copies = true) {
  SaveOptions options;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  options.timeout = 60;
  if (way == Way::kFiles) {
    options.by_files = ByFiles{comm.rank(), kRanks, "a run of this test"};
  } else {
    options.comm = comm;
  }
  if (!copies) return options;
  options.copies.emplace();
  options.copies->group = group_of(comm.rank());
  return options;
}

using Change = std::function<void(int rank, StateDict&, SaveOptions&)>;

FileImage saved(Way way, bool copies = true, const Change& change = {}) {
  const auto storage = memory_storage();
  run_ranks(kRanks, [&](Communicator comm) {
    StateDict state = state_of(comm.rank());
    SaveOptions options = saving(way, comm, copies);
    if (change) change(comm.rank(), state, options);
    save(state, Location(storage), options);
  });
  return memory_image(*storage);
}

Checkpoint opened(const FileImage& image) {
  return Checkpoint::open(Location(memory_storage(image)));
}

struct Quiet {
  LogLevel before = set_log_level(LogLevel::kOff);
  ~Quiet() { set_log_level(before); }
};

// The data files that each rank opens when it loads what it has saved.
std::vector<std::set<std::string>> files_opened(const FileImage& image, bool with_norm) {
  std::mutex mutex;
  std::vector<std::set<std::string>> files(kRanks);
  const auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
    const std::lock_guard lock(mutex);
    if (call.op == StorageOp::kOpen && call.name.ends_with(".distcp")) {
      files[static_cast<size_t>(call.client)].insert(std::string(call.name));
    }
    return FaultAction::pass();
  });
  run_ranks(kRanks, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    options.timeout = 60;
    options.differences.not_requested = Differences::Policy::kIgnore;
    StateDict wanted;
    const StateDict asked = state_of(comm.rank(), false);
    wanted["w"] = asked.at("w");
    wanted["config"] = asked.at("config");
    if (with_norm) wanted["norm"] = asked.at("norm");
    const StateDict loaded = load(wanted, Location(disk->storage(comm.rank())), options);
    EXPECT_EQ(loaded.get<Value>("config"), config());
    EXPECT_EQ(elements(loaded.get<ShardedTensor>("w").data),
              elements(counting(DType::kFloat32, {1, 64}, 64 * comm.rank())));
  });
  return files;
}

TEST(ObjectCopies, ARestartInTheSameLayoutOpensItsOwnFileAlone) {
  for (const Way way : kWays) {
    SCOPED_TRACE(static_cast<int>(way));
    const auto without = files_opened(saved(way, false), false);
    EXPECT_THAT(without, ElementsAre(SizeIs(1), SizeIs(2), SizeIs(2), SizeIs(2)));
    const FileImage image = saved(way);
    const auto files = files_opened(image, false);
    ASSERT_THAT(files, Each(SizeIs(1)));
    for (size_t rank = 0; rank < files.size(); ++rank) {
      EXPECT_THAT(*files[rank].begin(), HasSubstr("__" + std::to_string(rank) + "_"));
    }
    const Checkpoint checkpoint = opened(image);
    EXPECT_THAT(checkpoint.metadata().find_object("config")->copies, SizeIs(kRanks - 1));
    EXPECT_TRUE(checkpoint.verify().ok());
  }
}

// "rng" is on all ranks, and only rank 1's group contains its writer, rank 0. "own" differs on each
// rank.
TEST(ObjectCopies, OfShardedObjectsEqualOnesAreCopiedWhateverTheGroup) {
  const auto with_sharded = [](int rank, StateDict& state, SaveOptions&) {
    state["rng"] = ShardedObject::make("rng", Value(17), {1}, {0}, {rank});
    state["own"] = ShardedObject::make("own", Value(rank), {1}, {0}, {rank});
  };
  const Checkpoint checkpoint = opened(saved(Way::kExchange, true, with_sharded));
  const Metadata& metadata = checkpoint.metadata();
  const StoredObject& rng = *metadata.find_object("rng/shard_0_1");
  ASSERT_THAT(rng.copies, SizeIs(kRanks - 1));
  EXPECT_THAT(metadata.files[rng.copies[0].file], HasSubstr("__1_"));
  EXPECT_THAT(metadata.find_object("own/shard_0_1")->copies, IsEmpty());
  EXPECT_TRUE(checkpoint.verify().ok());
}

// If ranks have different values under a common key, every rank loads the lowest rank's value, with
// or without copies.
TEST(ObjectCopies, WhatIsNotTheSameIsNotCopiedOrNotReadAsACopy) {
  const Quiet quiet;
  const auto differing = [](int rank, StateDict& state, SaveOptions&) {
    state["config"] = rank < 3 ? config() : Value("of rank 3");
  };
  for (const Way way : kWays) {
    SCOPED_TRACE(static_cast<int>(way));
    const FileImage image = saved(way, true, differing);
    const Checkpoint checkpoint = opened(image);
    const StoredObject& object = *checkpoint.metadata().find_object("config");
    EXPECT_THAT(object.copies, SizeIs(2));
    EXPECT_THAT(object.unlike, SizeIs(way == Way::kExchange ? 0 : 1));
    EXPECT_TRUE(checkpoint.verify().ok());
    const auto files = files_opened(image, false);  // also compares the loaded values
    EXPECT_THAT(files, ElementsAre(SizeIs(1), SizeIs(1), SizeIs(1), SizeIs(2)));
  }
}

// With the plan of an earlier save, ranks would copy objects that are no longer equal.
TEST(ObjectCopies, InASessionTheContentsOfEachSaveCount) {
  const Quiet quiet;
  for (const bool common : {true, false}) {
    SCOPED_TRACE(common);
    const auto storage = memory_storage();
    run_ranks(kRanks, [&](Communicator comm) {
      Session session(comm);
      for (const bool differs : {false, true}) {
        StateDict state = state_of(comm.rank());
        const Value value = differs && comm.rank() == 1 ? Value("changed") : config();
        if (common) {
          state["config"] = value;
        } else {
          state["config"] = ShardedObject::make("config", value, {1}, {0}, {comm.rank()});
        }
        SaveOptions options = saving(Way::kExchange, comm);
        options.comm = {};
        options.overwrite = true;
        session.save(state, Location(storage), options);
      }
    });
    const Checkpoint checkpoint = Checkpoint::open(Location(storage));
    const std::string key = common ? "config" : "config/shard_0_1";
    EXPECT_THAT(checkpoint.metadata().find_object(key)->copies, SizeIs(kRanks - 2));
    EXPECT_EQ(checkpoint.read_object(key), config());
    EXPECT_TRUE(checkpoint.verify().ok());
  }
}

TEST(ObjectCopies, TheirBytesAreSaidAfterwardsAndCountForTheBudget) {
  const uint64_t of_config = opened(saved(Way::kFiles)).metadata().find_object("config")->at.length;
  for (const Way way : kWays) {
    for (const uint64_t budget : {of_config - 1, of_config, ~uint64_t{0}}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(way) << ", " << budget);
      const auto storage = memory_storage();
      run_ranks(kRanks, [&](Communicator comm) {
        SaveOptions options = saving(way, comm);
        options.copies->max_bytes = budget;
        StateDict state = state_of(comm.rank());
        const std::string own = "norm" + std::to_string(comm.rank());
        state["norm"] = ShardedTensor::from_rank_offsets(own, counting(DType::kFloat32, {64}), {});
        const SaveResult result = save(state, Location(storage), options);
        const bool copies = comm.rank() > 0 && budget >= of_config;
        EXPECT_EQ(result.copies, copies ? 1u : 0u);
        EXPECT_EQ(result.copy_bytes, copies ? of_config : 0u);
      });
    }
  }
}

TEST(ObjectCopies, ADamagedOneIsReadFromWhereItIsIntactAndMended) {
  const FileImage image = saved(Way::kExchange);
  const Metadata metadata = opened(image).metadata();
  const StoredObject& object = *metadata.find_object("config");
  for (const bool copy : {false, true}) {
    const ItemLocation& at = copy ? object.copies[0] : object.at;
    const std::string& file = metadata.files[at.file];
    FileImage one = image;
    one[file][at.offset + at.length / 2] ^= std::byte{4};
    {
      const LoggedWarnings logged;
      EXPECT_EQ(opened(one).read_object("config"), config());
      EXPECT_EQ(logged.texts().size(), copy ? 0u : 1u);
      files_opened(one, true);
      EXPECT_THAT(logged.texts(), Each(testing::AllOf(HasSubstr("\"config\""), HasSubstr(file))));
      EXPECT_FALSE(logged.texts().empty());
    }
    const auto damages = opened(one).verify().damages;
    ASSERT_EQ(damages.size(), 1u);
    EXPECT_EQ(damages[0].key, "config");
    EXPECT_EQ(damages[0].copy, copy);
    EXPECT_EQ(damages[0].intact_in, metadata.files[(copy ? object.at : object.copies[0]).file]);
    const auto storage = memory_storage(one);
    const RepairReport report = repair(Location(storage));
    EXPECT_THAT(report.mended, SizeIs(1));
    EXPECT_TRUE(report.now.ok());
    EXPECT_EQ(memory_image(*storage).at(file), image.at(file));
  }
}

TEST(ObjectCopies, WithoutAnIntactOneTheErrorNamesKeyAndFile) {
  FileImage image = saved(Way::kExchange);
  const Metadata metadata = opened(image).metadata();
  const StoredObject& object = *metadata.find_object("config");
  const auto damage = [&](const ItemLocation& at) {
    image[metadata.files[at.file]][at.offset + at.length / 2] ^= std::byte{4};
  };
  damage(object.at);
  for (const ItemLocation& copy : object.copies) damage(copy);
  const Quiet quiet;
  const auto texts = failures(1, [&](Communicator) { opened(image).read_object("config"); });
  EXPECT_THAT(texts[0],
              testing::AllOf(HasSubstr("config"), HasSubstr(".distcp"), HasSubstr("damaged")));
}

TEST(ObjectCopies, GoWithTheirKeyAndLeaveTheRestSound) {
  const auto in_megatrons = [](int rank, StateDict& state, SaveOptions& options) {
    state["config"] = ShardedObject::make("config", config(), {1}, {0}, {rank});
    options.dialect = megatron_dialect();
  };
  const FileImage image = saved(Way::kExchange, true, in_megatrons);
  EXPECT_THAT(opened(image).metadata().find_object("config/shard_0_1")->copies, SizeIs(kRanks - 1));
  for (const std::string key : {"config", "norm", "w"}) {
    const auto storage = memory_storage(image);
    remove_keys(Location(storage), key);
    const Checkpoint checkpoint = Checkpoint::open(Location(storage));
    const VerifyReport report = checkpoint.verify();
    EXPECT_TRUE(report.ok()) << key << ": " << report.damages[0].problem;
    const StoredObject* object = checkpoint.metadata().find_object("config/shard_0_1");
    ASSERT_EQ(object == nullptr, key == "config");
    // Without its row of "w", a copying rank's file has nothing that the index names.
    const size_t copies = key == "w" ? 0 : kRanks - 1;
    EXPECT_TRUE(object == nullptr || object->copies.size() == copies) << key;
  }
}

}  // namespace tilestone::object_copies_test
