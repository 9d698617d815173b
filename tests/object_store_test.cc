// What is done at a directory is done in an object store, too: one in memory, and SeaweedFS.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <string>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/storage/s3/real_server_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::object_store_test {

using testing::ElementsAre;

// Of a bucket of the server, whose address and keys the environment says, as for a user.
Location seaweed_location() {
  static int count = 0;
  if (count == 0) {
    for (const auto& [name, value] : s3::seaweed().config().environment) {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
    s3::seaweed().create_bucket("engine");
  }
  return "s3://engine/place-" + std::to_string(count++);
}

struct Place {
  const char* name;
  std::function<Location()> make;
};

class ObjectStore : public testing::TestWithParam<Place> {
 protected:
  const Location location_ = GetParam().make();
};

SaveOptions saving(const Communicator& comm, bool overwrite = false) {
  SaveOptions options;
  options.comm = comm;
  options.overwrite = overwrite;
  options.timeout = 60;
  return options;
}

void save_rows(const Location& location, int ranks, int64_t first, bool overwrite = false) {
  run_ranks(ranks, [&](Communicator comm) {
    save(row_state(comm, first), location, saving(comm, overwrite));
  });
}

TEST_P(ObjectStore, SavesOfOneAndOfFourRanksAreOpenedLoadedAndVerified) {
  save_rows(location_, 1, 3);
  expect_rows(location_, 3, 1);
  save_rows(location_, 4, 5, true);
  expect_rows(location_, 5, 4);
  EXPECT_TRUE(Checkpoint::open(location_).verify().ok());
  run_ranks(2, [&](Communicator comm) {
    StateDict wanted;
    wanted["w"] = ShardedTensor::from_rank_offsets(
        "w", TensorView::without_data(DType::kFloat32, {2, 8}), {{0, comm.rank(), comm.size()}});
    LoadOptions options;
    options.comm = comm;
    const StateDict loaded = load(wanted, location_, options);
    EXPECT_EQ(elements(loaded.at("w").as<ShardedTensor>().data),
              elements(counting(DType::kFloat32, {2, 8}, 5 + 16 * comm.rank())));
  });
}

TEST_P(ObjectStore, ASaveOverACheckpointNeedsOverwriteAndLeavesNothingOfIt) {
  save_rows(location_, 2, 3);
  expect_error([&] { save(row_state(0, 1), location_); }, ErrorCode::kAlreadyExists);
  expect_rows(location_, 3, 2);
  const auto names = location_.storage().list();
  save_rows(location_, 2, 7, true);
  expect_rows(location_, 7, 2);
  EXPECT_EQ(location_.storage().list().size(), names.size());
}

TEST_P(ObjectStore, SavesInTheBackground) {
  run_ranks(2, [&](Communicator comm) {
    async_save(row_state(comm, 3), location_, saving(comm)).result(60);
  });
  expect_rows(location_, 3, 2);
}

TEST_P(ObjectStore, IsConvertedToADirectoryAndBack) {
  save_rows(location_, 2, 3);
  const TempDirectory directory;
  const Location local(directory.path() + "/local");
  ConvertOptions options;
  options.format = "torch_dist";
  convert(location_, local, options);
  expect_rows(local, 3, 2);
  const Location back = GetParam().make();
  convert(local, back, options);
  expect_rows(back, 3, 2);
  options.format = "safetensors";
  options.keys = {"w"};
  const auto in_fixed_names = [&] { convert(location_, GetParam().make(), options); };
  expect_error(in_fixed_names, ErrorCode::kUnsupported, "fixed names");
}

TEST_P(ObjectStore, ARunKeepsItsLastSteps) {
  run_ranks(2, [&](Communicator comm) {
    ManagerOptions options;
    options.comm = comm;
    options.keep = Keep{.last = 2};
    CheckpointManager manager(location_, options);
    for (uint64_t step = 1; step <= 4; ++step) {
      manager.save(step, row_state(comm, static_cast<int64_t>(step)));
      manager.wait();
    }
    EXPECT_EQ(manager.latest(), 4u);
    // SeaweedFS still lists the folders of removed steps.
    const auto steps = manager.steps();
    const auto durable = std::ranges::count(steps, StepState::kDurable, &StepInfo::state);
    if (comm.rank() == 0) {
      EXPECT_EQ(durable, 2);
    }
    CheckpointManager second(location_, options);
    const auto restored = second.restore(row_template(comm));
    EXPECT_EQ(restored.step, 4u);
    EXPECT_EQ(restored.state.at("step").as<Value>(), Value(4));
  });
}

TEST_P(ObjectStore, GcFindsWhatAFailedSaveHasLeft) {
  save_rows(location_, 1, 3);
  EXPECT_THAT(find_leftovers(location_), ElementsAre());
}

Place in_memory() {
  return {"memory", [] { return Location(memory_objects()); }};
}

INSTANTIATE_TEST_SUITE_P(All, ObjectStore,
                         testing::Values(in_memory(), Place{"seaweed", seaweed_location}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace tilestone::object_store_test
