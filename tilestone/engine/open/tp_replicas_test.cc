// Megatron-Core's second names of replicas, "KEY.__tp_replica_RANK".
#include "tilestone/engine/open/tp_replicas_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/commit/removal.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::tp_replicas_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::string second_name(int rank) { return "norm.__tp_replica_" + std::to_string(rank); }

// A save of two tensor-parallel ranks: both have "norm", each under `name(rank)`, and rows of "w".
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

TEST(TpReplicas, ASecondNameOfASecondNameIsATensorOfItsOwn) {
  const std::string nested = second_name(1) + ".__tp_replica_2";
  const auto storage = memory_storage();
  StateDict state;
  for (const std::string& key : {std::string("norm"), second_name(1), nested}) {
    state[key] = ShardedTensor::from_rank_offsets(key, counting(DType::kFloat32, {4}, 7), {}, {0});
  }
  SaveOptions options;
  options.dialect = megatron_dialect();
  run_ranks(1, [&](Communicator comm) {
    options.comm = comm;
    save(state, Location(storage), options);
  });
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_THAT(checkpoint.keys(), ElementsAre("norm", nested));
  const Metadata& metadata = checkpoint.metadata();
  ASSERT_EQ(metadata.copies.size(), 1u);
  ASSERT_LT(metadata.copies[0].tensor, metadata.tensors.size());
  EXPECT_EQ(metadata.tensors[metadata.copies[0].tensor].key, "norm");
  EXPECT_TRUE(checkpoint.verify().ok());
  for (const std::string& key : checkpoint.keys()) {
    EXPECT_EQ(elements(checkpoint.read(key)), elements(counting(DType::kFloat32, {4}, 7)));
  }
}

// Saved with either form of the name, requested with either form, by more and by fewer ranks than
// have saved it.
TEST(TpReplicas, LoadUnderAnyTensorParallelSizeAndStrictnessSeesPlainKeys) {
  for (const auto& name :
       {std::function<std::string(int)>(second_name), std::function<std::string(int)>(plain)}) {
    const Location location(saved(name));
    for (const int ranks : {1, 2, 4}) {
      run_ranks(ranks, [&](Communicator comm) {
        for (const bool suffixed : {true, false}) {
          LoadOptions options;
          options.comm = comm;
          options.differences.not_in_checkpoint = Differences::Policy::kReport;
          options.differences.not_requested = Differences::Policy::kReport;
          options.checks.access = suffixed;  // the second names are those of replicas
          StateDict wanted = asking(suffixed ? second_name(comm.rank()) : "norm", comm.rank() == 0);
          LoadReport report;
          options.differences.report = &report;
          expect_norm(load(wanted, location, options));
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
  options.differences.not_in_checkpoint = Differences::Policy::kReport;
  options.differences.not_requested = Differences::Policy::kReport;
  StateDict wanted = asking("other.__tp_replica_3", false);
  LoadReport report;
  options.differences.report = &report;
  load(wanted, location, options);
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

// ---- Second names that a save writes

// Like saved(plain), but with replica ids of three numbers. `named`: with second names.
std::shared_ptr<Storage> saved_named(bool named, bool copies = false, bool by_files = false) {
  auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    StateDict state;
    state["norm"] = ShardedTensor::from_rank_offsets("norm", counting(DType::kFloat32, {4}, 7), {},
                                                     {0, comm.rank(), 0});
    state["w"] = ShardedTensor::from_rank_offsets(
        "w", counting(DType::kFloat32, {1, 8}, 8 * comm.rank()), {{0, comm.rank(), 2}}, {0, 0, 0});
    SaveOptions options;
    if (by_files) {
      options.by_files = ByFiles{comm.rank(), 2, "a test's token"};
    } else {
      options.comm = comm;
    }
    options.dialect = megatron_dialect();
    options.tp_replica_names = named;
    if (copies) {
      options.copies.emplace();
      options.copies->group = {0, 1};
    }
    save(state, Location(storage), options);
  });
  return storage;
}

// The contents of the index for a reader that does not know second names.
std::vector<std::string> keys_in_index(const std::shared_ptr<Storage>& storage) {
  DirectoryFiles files;
  files.names = {".metadata"};
  files.contents[".metadata"] = memory_image(*storage).at(".metadata");
  std::vector<std::string> keys;
  const Metadata metadata = torch_dist_format()->parse_index(files);
  const StoredTensor* plain = metadata.find_tensor("norm");
  for (const StoredTensor& tensor : metadata.tensors) {
    keys.push_back(tensor.key);
    if (plain == nullptr || engine::key_of_replica(tensor.key) != "norm") continue;
    EXPECT_EQ(tensor.chunks[0].at.file, plain->chunks[0].at.file);
    EXPECT_EQ(tensor.chunks[0].at.offset, plain->chunks[0].at.offset);
  }
  return keys;
}

TEST(TpReplicaNames, AreInTheIndexForTheSameBytesAndNowhereElse) {
  EXPECT_THAT(keys_in_index(saved_named(false)), ElementsAre("norm", "w"));
  for (const bool copies : {false, true}) {
    const auto storage = saved_named(true, copies);
    EXPECT_THAT(keys_in_index(storage),
                ElementsAre("norm", "norm.__tp_replica_0", "norm.__tp_replica_1", "w"));
    const Checkpoint checkpoint = Checkpoint::open(Location(storage));
    EXPECT_THAT(checkpoint.keys(), ElementsAre("norm", "w"));
    EXPECT_EQ(checkpoint.metadata().copies.size(), copies ? 1u : 0u);
    EXPECT_EQ(checkpoint.metadata().tensor_bytes(), 4u * 4u + 16u * 4u);
    const VerifyReport report = checkpoint.verify();
    EXPECT_TRUE(report.ok()) << report.damages[0].problem;
    const auto without = Checkpoint::open(Location(saved_named(false, copies)));
    EXPECT_EQ(report.items, without.verify().items);
    EXPECT_THAT(find_leftovers(Location(storage), true), IsEmpty());
  }
}

TEST(TpReplicaNames, AreInTheIndexOfASaveByFilesToo) {
  EXPECT_THAT(keys_in_index(saved_named(true, false, true)),
              ElementsAre("norm", "norm.__tp_replica_0", "norm.__tp_replica_1", "w"));
  EXPECT_THAT(keys_in_index(saved_named(false, false, true)), ElementsAre("norm", "w"));
}

TEST(TpReplicaNames, LoadUnderEitherNameAndStrictnessSeesPlainKeys) {
  FileImage image = memory_image(*saved_named(true));
  for (const bool manifest : {true, false}) {
    if (!manifest) {
      std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
    }
    for (const bool suffixed : {true, false}) {
      LoadOptions options;
      options.differences.not_in_checkpoint = Differences::Policy::kReport;
      options.differences.not_requested = Differences::Policy::kReport;
      LoadReport report;
      options.differences.report = &report;
      expect_norm(load(asking(suffixed ? second_name(1) : "norm"), Location(memory_storage(image)),
                       options));
      EXPECT_THAT(report.not_in_checkpoint, IsEmpty());
      EXPECT_THAT(report.not_requested, IsEmpty());
    }
  }
}

TEST(TpReplicaNames, StayAndGoWithTheirKey) {
  const auto storage = saved_named(true);
  remove_keys(Location(storage), "w");
  EXPECT_THAT(keys_in_index(storage),
              ElementsAre("norm", "norm.__tp_replica_0", "norm.__tp_replica_1"));
  EXPECT_TRUE(Checkpoint::open(Location(storage)).verify().ok());
  const auto other = saved_named(true);
  remove_keys(Location(other), "norm");
  EXPECT_THAT(keys_in_index(other), ElementsAre("w"));
  EXPECT_TRUE(Checkpoint::open(Location(other)).verify().ok());
}

TEST(TpReplicaNames, AreRefusedInAnotherDialectAndWhereTheyAreTaken) {
  const auto refusal = [](const std::function<void(StateDict&, SaveOptions&)>& change) {
    StateDict state;
    state["norm"] =
        ShardedTensor::from_rank_offsets("norm", counting(DType::kFloat32, {4}), {}, {0, 0, 0});
    SaveOptions options;
    options.dialect = megatron_dialect();
    options.tp_replica_names = true;
    change(state, options);
    const auto storage = memory_storage();
    const std::string text =
        failures(1, [&](Communicator) { save(state, Location(storage), options); })[0];
    EXPECT_FALSE(storage->stat(".metadata"));
    return text;
  };
  EXPECT_THAT(refusal([](StateDict&, SaveOptions& options) { options.dialect = nullptr; }),
              testing::HasSubstr("tp_replica_names needs Megatron-Core's dialect"));
  EXPECT_THAT(refusal([](StateDict& state, SaveOptions&) {
                state["norm"] = ShardedTensor::from_rank_offsets(
                    "norm", counting(DType::kFloat32, {4}), {}, {0, 1 << 16, 0});
              }),
              testing::HasSubstr("tensor-parallel rank 65536"));
  EXPECT_THAT(refusal([](StateDict& state, SaveOptions&) {
                for (const char* key : {"norm", "norm.__tp_replica_1"}) {
                  state[key] = ShardedTensor::from_rank_offsets(key, counting(DType::kFloat32, {4}),
                                                                {}, {0, 1, 0});
                }
              }),
              testing::HasSubstr("a key is also the name of a replica of norm"));
}

// A rank finds its own replica without a manifest, which would say which rank wrote which file.
TEST(TpReplicas, ARankReadsItsOwnReplicaWhereThereIsOne) {
  FileImage image = memory_image(*saved(second_name));
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
  std::mutex mutex;
  for (const int rank : {0, 1}) {
    std::set<std::string> opened;
    const auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
      const std::lock_guard lock(mutex);
      const bool data = call.name.ends_with(".distcp");
      if (call.op == StorageOp::kOpen && data) opened.insert(std::string(call.name));
      return FaultAction::pass();
    });
    LoadOptions options;
    options.differences.not_requested = Differences::Policy::kIgnore;
    expect_norm(load(asking(second_name(rank), false), Location(disk->storage()), options));
    ASSERT_EQ(opened.size(), 1u);
    EXPECT_THAT(*opened.begin(), testing::HasSubstr("__" + std::to_string(rank) + "_"));
  }
}

// Without a manifest the names of the data files say which rank wrote them.
TEST(TpReplicas, ARankOpensItsOwnFileUnderEitherName) {
  FileImage image = memory_image(*saved(second_name));
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
  using TwoPhase = Reading::TwoPhase;
  for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
    for (const bool suffixed : {true, false}) {
      std::mutex mutex;
      std::vector<std::set<std::string>> opened(2);
      const auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
        const std::lock_guard lock(mutex);
        const bool data = call.name.ends_with(".distcp");
        if (call.op != StorageOp::kOpen || !data) return FaultAction::pass();
        opened[static_cast<size_t>(call.client)].insert(std::string(call.name));
        return FaultAction::pass();
      });
      run_ranks(2, [&](Communicator comm) {
        LoadOptions options;
        options.comm = comm;
        options.reading.two_phase = mode;
        const std::string norm = suffixed ? second_name(comm.rank()) : "norm";
        StateDict wanted = asking(norm, false);
        wanted["w"] = ShardedTensor::from_rank_offsets(
            "w", TensorView::without_data(DType::kFloat32, {1, 8}), {{0, comm.rank(), 2}});
        expect_norm(load(wanted, Location(disk->storage(comm.rank())), options));
      });
      for (size_t rank = 0; rank < 2; ++rank) {
        ASSERT_EQ(opened[rank].size(), 1u);
        EXPECT_THAT(*opened[rank].begin(), testing::HasSubstr("__" + std::to_string(rank) + "_"));
      }
    }
  }
}

// If a rank has no replica of its own, it reads any other one; if they differ, the lowest rank's.
TEST(TpReplicas, OfReplicasThatAreNotTheSameARankGetsItsOwnElseTheLowest) {
  const Location location(saved(second_name, 100));
  LoadOptions options;
  options.differences.not_requested = Differences::Policy::kIgnore;
  expect_norm(load(asking(second_name(5), false), location, options));
  const StateDict own = load(asking(second_name(1), false), location, options);
  EXPECT_EQ(elements(own.find(std::string("norm"))->get_if<ShardedTensor>()->data),
            elements(counting(DType::kFloat32, {4}, 107)));
}

}  // namespace tilestone::tp_replicas_test
