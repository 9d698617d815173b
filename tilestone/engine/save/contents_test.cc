// What ranks hold differently although only one version of it is saved: it is named or refused, and
// what belongs together comes from one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <span>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/engine/session.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/geometry/placement.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/plan/contents.h"
#include "tilestone/state/device_memory_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::contents_test {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using Differing = Checks::Differing;

SaveOptions saving(const Communicator& comm, Differing differing = Differing::kWarn,
                   bool megatron = false) {
  SaveOptions options;
  options.comm = comm;
  options.checks.common_differs = differing;
  options.resources.threads = 1;
  options.timeout = 30;
  if (megatron) options.dialect = megatron_dialect();
  return options;
}

// A plain tensor. With `ranks`, as Python's binding describes it to ranks that save by files.
StateNode plain(const std::string& key, TensorView data, int ranks = 0) {
  if (ranks == 0) return data;
  ShardedTensor tensor = ShardedTensor::from_box(key, data, data.shape, Box::whole(data.shape));
  for (int rank = 0; rank < ranks; ++rank) tensor.holders.push_back(rank);
  tensor.common = true;
  return tensor;
}

// One dict whose parts belong together. `tag` makes the keys those of one test, because a warning
// is logged once in a process.
StateDict loader_of(const std::string& tag, int rank, int ranks = 0) {
  StateDict state;
  state[tag + ".n"] = Value(int64_t{100 + rank});
  for (const char* name : {".a", ".b", ".c", ".d"}) {
    const std::string key = tag + name;
    state[key] = plain(key, counting(DType::kInt64, {4}, rank), ranks);
  }
  return state;
}

TEST(Contents, WhatBelongsTogetherIsSavedFromOneRankAndEachKeyIsNamedWithItsRanks) {
  const Location location(memory_storage());
  const LoggedWarnings warnings;
  run_ranks(3, [&](const Communicator& comm) {
    save(loader_of("exchange", comm.rank()), location, saving(comm));
  });
  for (const char* name : {".n", ".a", ".b", ".c", ".d"}) {
    EXPECT_THAT(warnings.texts(), Contains(HasSubstr("\"exchange" + std::string(name) +
                                                     "\" (ranks 0, 1 and 2 differ), and that of "
                                                     "rank 0 is saved")));
  }
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_EQ(checkpoint.read_object("exchange.n"), Value(100));
  for (const char* name : {".a", ".b", ".c", ".d"}) {
    EXPECT_EQ(elements(checkpoint.read("exchange" + std::string(name))),
              elements(counting(DType::kInt64, {4}, 0)));
  }
}

TEST(Contents, WhereThatIsAnErrorEveryRankThrowsItAndNothingIsWritten) {
  const auto storage = memory_storage();
  const auto texts = failures(3, [&](const Communicator& comm) {
    StateDict state;
    state["rng"] = counting(DType::kUInt8, {16}, comm.rank() / 2);
    save(state, Location(storage), saving(comm, Differing::kError));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("not the same on all ranks"),
                                HasSubstr("\"rng\" (ranks 0 and 2 differ)"))));
  EXPECT_THAT(storage->list(), IsEmpty());
}

StateDict replicas_of(int rank, int64_t value) {
  StateDict state;
  state["rng"] = ShardedObject::make("rng", Value(value), {1}, {0}, {rank == 1 ? 0 : rank + 1});
  state["own"] = ShardedObject::make("own", Value(rank), {3}, {rank});
  state["w"] = ShardedTensor::from_box("w", counting(DType::kFloat32, {4}, value), {4},
                                       Box::whole({4}), {rank});
  return state;
}

TEST(Contents, ReplicasOfObjectsAndSmallTensorsAreComparedInBothDialects) {
  for (const bool megatron : {false, true}) {
    const auto save_with = [&](Differing differing, int64_t of_rank_2) {
      const auto storage = memory_storage();
      const auto texts = failures(3, [&](const Communicator& comm) {
        save(replicas_of(comm.rank(), comm.rank() == 2 ? of_rank_2 : 5), Location(storage),
             saving(comm, differing, megatron));
      });
      if (of_rank_2 != 5 && differing == Differing::kError) {
        EXPECT_THAT(storage->list(), IsEmpty());
      }
      return texts;
    };
    EXPECT_THAT(save_with(Differing::kError, 6),
                Each(AllOf(HasSubstr("\"rng/shard_0_1\" (ranks 1 and 2 differ)"),
                           HasSubstr("\"w\" (ranks 0 and 2 differ)"))));
    EXPECT_THAT(save_with(Differing::kError, 5), Each(std::string()));
    EXPECT_THAT(save_with(Differing::kIgnore, 6), Each(std::string()));
  }
}

TEST(Contents, LargerTensorsAreNotComparedAndStayBalanced) {
  const Location location(memory_storage());
  std::atomic<uint64_t> most = 0;
  const int64_t large = 2 * static_cast<int64_t>(kMaxComparedBytes);
  run_ranks(2, [&](const Communicator& comm) {
    StateDict state;
    for (const char* key : {"a", "b"}) state[key] = counting(DType::kUInt8, {large}, comm.rank());
    const SaveResult result = save(state, location, saving(comm, Differing::kError));
    if (result.bytes_written > most) most = result.bytes_written;
  });
  EXPECT_LT(most, 1.5 * static_cast<double>(large));
}

// ---- In a session

TEST(Contents, WithAnEarlierPlanDifferencesAreFoundWithoutSendingPlans) {
  const std::vector<Location> at = memory_locations(4);
  const LoggedWarnings warnings;
  run_ranks(3, [&](const Communicator& comm) {
    Session session(comm, 30);
    const auto state_of = [&](int64_t of_rank_1) {
      StateDict state = row_state(comm, 3);
      const int64_t value = comm.rank() == 1 ? of_rank_1 : 5;
      state["kept.tensor"] = counting(DType::kInt64, {4}, value);
      state["kept.object"] =
          ShardedObject::make("kept.object", Value(value), {1}, {0}, {comm.rank()});
      return state;
    };
    session.save(state_of(5), at[0], saving(comm));
    const uint64_t sent = session.stats().plan_bytes_sent;
    session.save(state_of(6), at[1], saving(comm));
    session.save(state_of(7), at[2], saving(comm));
    session.save(state_of(5), at[3], saving(comm, Differing::kError));
    EXPECT_EQ(session.stats().plans_from_cache, 3u);
    EXPECT_EQ(session.stats().plan_bytes_sent, sent);
  });
  EXPECT_THAT(warnings.texts(), Contains(HasSubstr("\"kept.tensor\" (ranks 0 and 1 differ)")));
  EXPECT_THAT(warnings.texts(),
              Contains(HasSubstr("\"kept.object/shard_0_1\" (ranks 0 and 1 differ)")));
}

// ---- Disjoint meshes

// Expert weights as ranks 0, 2 and ranks 1, 3 hold them: each pair has a mesh of its own.
StateDict experts_of(int rank, int64_t rows, int64_t first) {
  const std::vector<int> ranks = {rank % 2, rank % 2 + 2};
  const Mesh mesh({2}, ranks);
  const TensorView local = counting(DType::kFloat32, {rows / 2, 8}, first + 100 * (rank / 2));
  const std::vector<Placement> placements = {Shard{0}};
  StateDict state;
  state["experts.w1"] =
      ShardedTensor::from_placements("experts.w1", local, {rows, 8}, mesh, placements, rank);
  return state;
}

TEST(Contents, TensorsOfOneKeyOnDisjointMeshesAreRefusedUnlessTheyAreReplicas) {
  for (const int64_t rows : {4, 1 << 14}) {  // 16 KiB and 512 KiB on each rank
    const auto storage = memory_storage();
    const auto texts = failures(4, [&](const Communicator& comm) {
      save(experts_of(comm.rank(), rows, comm.rank() % 2), Location(storage), saving(comm));
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("experts.w1"), HasSubstr("ranks 0 and 1 differ"),
                                  HasSubstr("docs/placements.md"))));
    EXPECT_THAT(storage->list(), IsEmpty());
    EXPECT_THAT(failures(4,
                         [&](const Communicator& comm) {
                           save(experts_of(comm.rank(), rows, 7), Location(storage),
                                saving(comm, Differing::kError));
                         }),
                Each(std::string()));
  }
}

TEST(Contents, DisjointMeshesAreComparedWithAnEarlierPlanToo) {
  const std::vector<Location> at = memory_locations(3);
  const auto texts = failures(4, [&](const Communicator& comm) {
    Session session(comm, 30);
    session.save(experts_of(comm.rank(), 1 << 14, 7), at[0], saving(comm));
    session.save(experts_of(comm.rank(), 1 << 14, 8), at[1], saving(comm));
    EXPECT_EQ(session.stats().plans_from_cache, 1u);
    session.save(experts_of(comm.rank(), 1 << 14, comm.rank() % 2), at[2], saving(comm));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("experts.w1"), HasSubstr("docs/placements.md"))));
  EXPECT_THAT(at[2].storage().list(), IsEmpty());
}

// ---- Lists

StateDict lists_of(int rank, int length, bool with_common) {
  StateList list;
  for (int i = 0; i < length; ++i) {
    const std::string key = "p" + std::to_string(10 * rank + i);
    StateDict one;
    one["exp_avg"] =
        ShardedTensor::from_box(key, counting(DType::kFloat32, {2}), {2}, Box::whole({2}));
    if (with_common) one["step"] = Value(5);
    list.emplace_back(std::move(one));
  }
  StateDict optimizer;
  optimizer["param_state"] = std::move(list);
  StateDict state;
  state["optimizer"] = std::move(optimizer);
  return state;
}

TEST(Contents, AListWithCommonValuesWhoseLengthDiffersIsRefusedWithItsPath) {
  const std::vector<int> lengths = {1, 3, 0};
  const auto said = AllOf(HasSubstr("optimizer.param_state"), HasSubstr("the same length"),
                          HasSubstr("3 on rank 1"));
  for (const bool megatron : {false, true}) {
    const auto storage = memory_storage();
    const auto save_lists = [&](bool with_common, Differing differing) {
      return failures(3, [&](const Communicator& comm) {
        const int length =
            with_common ? lengths[static_cast<size_t>(comm.rank())] : 1 + comm.rank();
        save(lists_of(comm.rank(), length, with_common), Location(storage),
             saving(comm, differing, megatron));
      });
    };
    EXPECT_THAT(save_lists(true, Differing::kIgnore), Each(said));
    EXPECT_THAT(save_lists(true, Differing::kWarn), Each(said));
    EXPECT_THAT(storage->list(), IsEmpty());
    EXPECT_THAT(save_lists(false, Differing::kWarn), Each(std::string()));
  }
}

TEST(Contents, ByFilesSuchAListIsRefusedWhenItIsPublished) {
  const Location location(memory_storage());
  SaveOptions options = by_files(0, 2);
  options.dialect = megatron_dialect();
  save(lists_of(0, 1, true), location, options);
  options.by_files->rank = 1;
  expect_error([&] { save(lists_of(1, 3, true), location, options); }, ErrorCode::kMismatch,
               "optimizer.param_state");
  EXPECT_FALSE(location.storage().stat("metadata.json"));
}

// ---- By files

TEST(Contents, ByFilesDifferencesAreNamedOrRefusedWhenTheSaveIsPublished) {
  for (const Differing differing : {Differing::kWarn, Differing::kError, Differing::kIgnore}) {
    const Location location(memory_storage());
    const LoggedWarnings warnings;
    std::string thrown;
    for (const int rank : {1, 0}) {
      SaveOptions options = by_files(rank, 2);
      options.checks.common_differs = differing;
      try {
        StateDict state = loader_of("files", rank, 2);
        state["rng"] = ShardedObject::make("files.rng", Value(rank), {1}, {0}, {1 - rank});
        save(state, location, options);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kMismatch);
        thrown = error.what();
      }
    }
    std::string said = thrown;
    for (const std::string& text : warnings.texts()) said += text;
    const bool is_published = location.storage().stat(".metadata").has_value();
    EXPECT_EQ(is_published, differing != Differing::kError) << thrown;
    if (differing == Differing::kIgnore) {
      EXPECT_EQ(said, "");
      continue;
    }
    for (const char* key : {"files.n", "files.a", "files.d", "files.rng/shard_0_1"}) {
      EXPECT_THAT(said, HasSubstr("\"" + std::string(key) + "\" (ranks 0 and 1 differ)"));
    }
    if (!is_published) continue;
    const Checkpoint checkpoint = Checkpoint::open(location);
    EXPECT_EQ(checkpoint.read_object("files.n"), Value(100));
    EXPECT_EQ(checkpoint.read_object("files.rng/shard_0_1"), Value(1));
    EXPECT_EQ(elements(checkpoint.read("files.b")), elements(counting(DType::kInt64, {4}, 0)));
  }
}

TEST(Contents, UnderOneTokenASecondSaveOfOtherContentIsRefusedAndSoIsOneOfAnotherShape) {
  const auto state_of = [](int rank) {
    StateDict state = loader_of("again", 0, 2);
    state["large"] = ShardedTensor::from_rank_offsets(
        "large", counting(DType::kFloat32, {1 << 15}, rank), {{0, rank, 2}});
    return state;
  };
  using Change = std::function<void(StateDict&)>;
  const std::map<std::string, Change> changes = {
      {"large",
       [](StateDict& s) {
         s.get<ShardedTensor>("large").pieces[0].data.elements<float>()[70] = 0.5f;
       }},
      {"again.n", [](StateDict& s) { s["again.n"] = Value(1); }},
      {"again.c",
       [](StateDict& s) { s["again.c"] = plain("again.c", counting(DType::kInt64, {5}), 2); }},
      {"again.b", [](StateDict& s) {
         s.get<ShardedTensor>("again.b").pieces[0].data.elements<int64_t>()[1] = 77;
       }}};
  for (const bool published : {false, true}) {
    for (const auto& [key, change] : changes) {
      const Location location(memory_storage());
      for (int rank = 0; rank < (published ? 2 : 1); ++rank) {
        save(state_of(rank), location, by_files(rank, 2));
      }
      EXPECT_NO_THROW(save(state_of(0), location, by_files(0, 2)));
      StateDict other = state_of(0);
      change(other);
      try {
        save(other, location, by_files(0, 2));
        ADD_FAILURE() << "nothing was thrown for " << key;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
        EXPECT_EQ(error.key(), key) << error.what();
        EXPECT_EQ(error.rank(), 0);
      }
    }
  }
}

// ---- What it costs

TEST(Contents, SmallTensorsOnADeviceAreFetchedTogetherAndOneRankComparesNothing) {
  const auto device = LateDevice::create();
  StateDict state;
  for (int i = 0; i < 20; ++i) {
    state["t" + std::to_string(i)] = device->put(counting(DType::kInt64, {4}, i));
  }
  const auto plan = [&](int ranks) {
    const Location location(memory_storage());
    run_ranks(ranks, [&](const Communicator& comm) {
      begin_save(state, location, saving(comm));  // is given up
    });
  };
  plan(1);
  EXPECT_EQ(device->batches, 0u);
  plan(2);
  EXPECT_EQ(device->batches, 2u);  // one on each rank
  EXPECT_EQ(device->copies, 40u);
}

}  // namespace tilestone::contents_test
