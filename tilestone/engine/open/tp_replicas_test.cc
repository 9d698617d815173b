// Megatron-Core's second names of replicas, "KEY.__tp_replica_RANK".
#include "tilestone/engine/open/tp_replicas_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/comm/threads.h"
#include "tilestone/engine/commit/removal.h"
#include "tilestone/engine/engine_testing.h"

namespace tilestone {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::string second_name(int rank) { return "norm.__tp_replica_" + std::to_string(rank); }

// Of two tensor-parallel ranks: "norm", which both have, each under `name(rank)`, and rows of "w".
std::shared_ptr<Storage> saved(const std::function<std::string(int)>& name, int64_t step = 0) {
  auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    StateDict state;
    state["norm"] = ShardedTensor::from_rank_offsets(
        name(comm.rank()), counting(DType::kFloat32, {4}, 7 + step * comm.rank()), {},
        name(0) == name(1) ? ReplicaId{comm.rank()} : ReplicaId{0});
    state["w"] = ShardedTensor::from_rank_offsets(
        "w", counting(DType::kFloat32, {1, 8}, 8 * comm.rank()), {{0, comm.rank(), 2}});
    SaveOptions options;
    options.comm = comm;
    options.dialect = megatron_dialect();
    save(state, Location(storage), options);
  });
  return storage;
}

std::string plain(int) { return "norm"; }

StateDict asking(const std::string& norm, bool with_w = true, int64_t width = 4) {
  StateDict wanted;
  wanted["norm"] = ShardedTensor::from_rank_offsets(
      norm, TensorView::without_data(DType::kFloat32, {width}), {}, {0});
  if (with_w) {
    wanted["w"] = ShardedTensor::from_rank_offsets(
        "w", TensorView::without_data(DType::kFloat32, {2, 8}), {});
  }
  return wanted;
}

void expect_norm(const StateDict& loaded) {
  EXPECT_EQ(elements(loaded.find(std::string("norm"))->get_if<ShardedTensor>()->data),
            elements(counting(DType::kFloat32, {4}, 7)));
}

TEST(TpReplicas, AreOneTensorOfThePlainNameWithCopies) {
  const auto storage = saved(second_name);
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_THAT(checkpoint.keys(), ElementsAre("norm", "w"));
  ASSERT_EQ(checkpoint.metadata().copies.size(), 1u);
  EXPECT_EQ(checkpoint.metadata().tensors[checkpoint.metadata().copies[0].tensor].key, "norm");
  EXPECT_TRUE(checkpoint.verify().ok());
}

// Under either form, asked for in either form, by more and by fewer ranks than have saved it.
TEST(TpReplicas, LoadUnderAnyTensorParallelSizeAndStrictnessSeesPlainKeys) {
  for (const auto& name :
       {std::function<std::string(int)>(second_name), std::function<std::string(int)>(plain)}) {
    const Location location(saved(name));
    for (const int ranks : {1, 2, 4}) {
      run_ranks(ranks, [&](Communicator comm) {
        for (const bool suffixed : {true, false}) {
          LoadOptions options;
          options.comm = comm;
          options.not_in_checkpoint = LoadOptions::Policy::kReport;
          options.not_requested = LoadOptions::Policy::kReport;
          options.validate_access = suffixed;  // the second names are those of replicas
          StateDict wanted = asking(suffixed ? second_name(comm.rank()) : "norm", comm.rank() == 0);
          LoadReport report;
          expect_norm(load(wanted, location, options, &report));
          EXPECT_THAT(report.not_in_checkpoint, IsEmpty());
          EXPECT_THAT(report.not_requested, IsEmpty());
        }
      });
    }
  }
}

TEST(TpReplicas, WhatIsMissingIsReportedUnderThePlainNameAndKeptUnderBoth) {
  const Location location(saved(second_name));
  LoadOptions options;
  options.not_in_checkpoint = LoadOptions::Policy::kReport;
  options.not_requested = LoadOptions::Policy::kReport;
  StateDict wanted = asking("other.__tp_replica_3", false);
  LoadReport report;
  load(wanted, location, options, &report);
  EXPECT_THAT(report.not_in_checkpoint, ElementsAre("other"));
  EXPECT_THAT(report.not_requested, ElementsAre("norm", "w"));
}

TEST(TpReplicas, TensorsThatAreNotTheSameKeepTheirNames) {
  const Location location(saved(second_name, 100));
  EXPECT_THAT(Checkpoint::open(location).keys(),
              ElementsAre("norm.__tp_replica_0", "norm.__tp_replica_1", "w"));
  expect_norm(load(asking(second_name(0)), location));
}

TEST(TpReplicas, OtherKeysAreNone) {
  EXPECT_EQ(engine::key_of_replica("a.b.__tp_replica_12"), "a.b");
  for (const char* key : {"a.b", "a.__tp_replica_", "a.__tp_replica_x", "a.__tp_replica_1.b",
                          ".__tp_replica_1", "a.__tp_replica_9999999999"}) {
    EXPECT_EQ(engine::key_of_replica(key), "") << key;
  }
}

TEST(TpReplicas, ARemovalLeavesTheNamesAsTheyAreStored) {
  const auto storage = saved(second_name);
  remove_keys(Location(storage), "w");
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_THAT(checkpoint.keys(), ElementsAre("norm"));
  EXPECT_EQ(checkpoint.metadata().copies.size(), 1u);
  EXPECT_TRUE(checkpoint.verify().ok());
}

}  // namespace
}  // namespace tilestone
