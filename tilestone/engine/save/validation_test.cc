// What ranks check about each other before anything is written or read: who holds main replicas,
// and whether the common states are equal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/load/load.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/save/save_steps_internal.h"

namespace tilestone::validation_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using Differing = Checks::Differing;

constexpr int kRanks = 4;

SaveOptions saving(const Communicator& comm, bool megatron = true) {
  SaveOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.timeout = 60;
  if (megatron) options.dialect = megatron_dialect();
  return options;
}

// Two rows, each on two ranks, of which ranks 0 and 2 have the main replicas; and one object per
// rank.
StateDict state_of(int rank) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, 8 * (rank / 2)), {{0, rank / 2, 2}}, {rank % 2});
  state["rng"] = ShardedObject::make("rng", Value(rank), {kRanks}, {rank});
  state["step"] = 3;
  return state;
}

ShardedTensor& w_of(StateDict& state) { return *state["w"].get_if<ShardedTensor>(); }

struct Wrong {
  std::function<void(StateDict&, int)> change;
  std::vector<std::string> said;
};

std::vector<Wrong> wrong_states() {
  return {
      {[](StateDict& state, int rank) {
         if (rank == 3) w_of(state).replica_id = {0};
       },
       {"box [1:2, 0:8] is held by the main replicas of ranks 2 and 3", "key w"}},
      {[](StateDict& state, int rank) {
         if (rank == 2) w_of(state).replica_id = {1};
       },
       {"box [1:2, 0:8]", "held by no main replica; a replica of it is on ranks 2 and 3"}},
      {[](StateDict& state, int rank) {
         if (rank == 1) state["rng"] = ShardedObject::make("rng", Value(0), {kRanks}, {0}, {1});
       },
       {"the cell [1] of an object whose grid is [4] is held by no rank (cells held: 3)",
        "key rng"}},
  };
}

TEST(ValidateAccess, ASaveOfWhatMainReplicasDoNotHoldOnceIsRefusedOnEveryRank) {
  for (const Wrong& wrong : wrong_states()) {
    for (const bool megatron : {false, true}) {
      const auto storage = memory_storage();
      const auto texts = failures(kRanks, [&](Communicator comm) {
        StateDict state = state_of(comm.rank());
        wrong.change(state, comm.rank());
        SaveOptions options = saving(comm, megatron);
        options.checks.access = true;
        save(state, Location(storage), options);
      });
      for (const std::string& said : wrong.said) EXPECT_THAT(texts, Each(HasSubstr(said)));
      EXPECT_THAT(storage->list(), IsEmpty());
    }
  }
}

TEST(ValidateAccess, WithoutItReplicasOfOneBoxAndGridsThatLackCellsAreAccepted) {
  for (const Wrong& wrong : wrong_states()) {
    const auto storage = memory_storage();
    run_ranks(kRanks, [&](Communicator comm) {
      StateDict state = state_of(comm.rank());
      wrong.change(state, comm.rank());
      save(state, Location(storage), saving(comm));
    });
    EXPECT_THAT(storage->list(), Not(IsEmpty()));
  }
}

TEST(ValidateAccess, WhatIsRightIsSavedAndLoadedInBothDialects) {
  for (const bool megatron : {false, true}) {
    const auto storage = memory_storage();
    run_ranks(kRanks, [&](Communicator comm) {
      StateDict state = state_of(comm.rank());
      TensorView plain = counting(DType::kInt64, {3}, 5);
      state["plain"] = plain;
      SaveOptions options = saving(comm, megatron);
      options.checks.access = true;
      save(state, Location(storage), options);
      LoadOptions load_options;
      load_options.comm = comm;
      load_options.checks.access = true;
      const StateDict loaded = load(state_of(comm.rank()), Location(storage), load_options);
      EXPECT_EQ(loaded.find(std::string("rng"))->get_if<ShardedObject>()->data, Value(comm.rank()));
    });
  }
}

TEST(ValidateAccess, ALoadIsRefusedOnEveryRankBeforeAnythingIsRead) {
  const auto storage = memory_storage();
  run_ranks(kRanks, [&](Communicator comm) {
    save(state_of(comm.rank()), Location(storage), saving(comm));
  });
  for (const Wrong& wrong : wrong_states()) {
    const auto texts = failures(kRanks, [&](Communicator comm) {
      StateDict wanted = state_of(comm.rank());
      w_of(wanted) = ShardedTensor::from_rank_offsets("w", counting(DType::kFloat32, {1, 8}, 100),
                                                      {{0, comm.rank() / 2, 2}}, {comm.rank() % 2});
      wrong.change(wanted, comm.rank());
      LoadOptions options;
      options.comm = comm;
      options.checks.access = true;
      try {
        load(wanted, Location(storage), options);
      } catch (...) {
        EXPECT_EQ(elements(w_of(wanted).data), elements(counting(DType::kFloat32, {1, 8}, 100)));
        throw;
      }
    });
    for (const std::string& said : wrong.said) EXPECT_THAT(texts, Each(HasSubstr(said)));
  }
  EXPECT_THAT(failures(kRanks,
                       [&](Communicator comm) {
                         LoadOptions options;
                         options.comm = comm;
                         options.checks.access = comm.rank() == 2;
                         load(state_of(comm.rank()), Location(storage), options);
                       }),
              Each(HasSubstr("the ranks don't agree on checks.access")));
}

// ---- The common state ----

// A state whose common state differs on ranks 1 and 3, in three places.
StateDict with_common(int rank) {
  StateDict state = state_of(rank), args;
  args["lr"] = rank % 2 == 0 ? 0.5 : 0.25;
  args["same"] = Value::list({1, 2});
  if (rank != 3) args["only"] = 1;
  state["args"] = std::move(args);
  if (rank % 2 == 1) state["deep"] = Value::dict({{"a", Value::dict({{"b", 1}})}});
  return state;
}

std::vector<std::string> logged_by_saves(const std::function<void(Communicator)>& body) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  run_ranks(kRanks, body);
  set_log_sink({});
  return said;
}

TEST(CommonState, WhereRanksDifferEachSaveLogsThePathsAndRanks) {
  const Location places[] = {Location(memory_storage()), Location(memory_storage())};
  const auto said = logged_by_saves([&](Communicator comm) {
    SaveOptions options = saving(comm);
    for (const Location& place : places) save(with_common(comm.rank()), place, options);
  });
  ASSERT_EQ(said.size(), 2u);
  EXPECT_THAT(
      said, Each(AllOf(HasSubstr("the common state of ranks 1 and 3 differs from that of rank 0"),
                       HasSubstr("\"args.lr\" (rank 0: 0.5; rank 1: 0.25)"),
                       HasSubstr("\"deep\" (rank 0: nothing; rank 1: {"), Not(HasSubstr("deep.a")),
                       Not(HasSubstr("same")), HasSubstr("the common state of rank 0 is saved"))));
}

TEST(CommonState, WhereRanksDifferAndThatIsAnErrorNothingIsWritten) {
  for (const bool megatron : {true, false}) {
    const auto storage = memory_storage();
    const auto texts = failures(kRanks, [&](Communicator comm) {
      SaveOptions options = saving(comm, megatron);
      options.checks.common_differs = Differing::kError;
      save(with_common(comm.rank()), Location(storage), options);
    });
    EXPECT_THAT(texts, Each(HasSubstr("args.lr")));
    EXPECT_THAT(storage->list(), IsEmpty());
  }
}

TEST(CommonState, TheOrderOfDictsIsNoDifferenceAndIgnoredOnesAreNotLogged) {
  const Location places[] = {Location(memory_storage()), Location(memory_storage())};
  EXPECT_THAT(logged_by_saves([&](Communicator comm) {
                StateDict state = state_of(comm.rank());
                const Value a = Value::dict({{"x", 1}, {"y", 2}});
                const Value b = Value::dict({{"y", 2}, {"x", 1}});
                state["args"] = comm.rank() == 0 ? a : b;
                SaveOptions options = saving(comm);
                options.checks.common_differs = Differing::kError;
                save(state, places[0], options);
                options.checks.common_differs = Differing::kIgnore;
                save(with_common(comm.rank()), places[1], options);
              }),
              IsEmpty());
}

TEST(CommonState, AnotherOneMayBeComparedThanIsSaved) {
  const auto storage = memory_storage();
  const auto save_with = [&](const std::function<std::optional<StateDict>(int)>& compared) {
    return failures(kRanks, [&](Communicator comm) {
      engine::SaveRequest request{with_common(comm.rank()), Location(storage), saving(comm), {}};
      request.options.checks.common_differs = Differing::kError;
      request.options.overwrite = true;
      request.compared_common = compared(comm.rank());
      save_in_a_row({request.location, request.options, Deadline::after(std::chrono::seconds(60))},
                    view_of(request));
    });
  };
  EXPECT_THAT(save_with([](int) { return StateDict(); }), Each(std::string()));
  const auto differing = [](int rank) {
    StateDict compared;
    compared["rank"] = rank / 3;
    return compared;
  };
  EXPECT_THAT(save_with(differing), Each(AllOf(HasSubstr("of rank 3 differs from that of rank 0"),
                                               HasSubstr("\"rank\" (rank 0: 0; rank 3: 1)"))));
}

}  // namespace tilestone::validation_test
