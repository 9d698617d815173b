#include "tilestone/engine/run/rounds_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <exception>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/relay_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"

namespace tilestone::engine::rounds_test {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kRanks = 3;

Deadline plenty() { return Deadline::after(std::chrono::seconds(60)); }

Bytes nothing(Deadline) { return {}; }
std::vector<Bytes> no_answers(std::vector<Bytes>) { return {}; }

// The group's first scatter fails at the coordinator, after its messages were sent.
class LosesAnOutcome final : public RelayComm {
 public:
  using RelayComm::RelayComm;
  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) override {
    Bytes part = comm_.scatter(std::move(parts), deadline);
    if (rank() == 0 && ++scatters_ == 1) {
      throw Error(ErrorCode::kTimeout, "rank 2 took nothing").with_rank(2);
    }
    return part;
  }

 private:
  int scatters_ = 0;
};

TEST(Rounds, AnOutcomeThatCouldNotBeDeliveredFailsTheNextRoundOnAllRanks) {
  const auto texts = failures(kRanks, [](const Communicator& plain) {
    const Communicator comm(std::make_shared<LosesAnOutcome>(plain));
    Rounds rounds(comm, "save", "a", plenty());
    rounds.run("planning", nothing, no_answers);
    rounds.run("writing", nothing, no_answers);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("planning"), HasSubstr("rank 2 took nothing"))));
}

// A signal handler throws while a rank waits in one of the round's collectives.
class ThrowsWhileWaiting final : public RelayComm {
 public:
  ThrowsWhileWaiting(Communicator comm, bool in_gather)
      : RelayComm(std::move(comm)), in_gather_(in_gather) {}
  std::vector<Bytes> gather(ByteView mine, Deadline deadline) override {
    if (in_gather_) stop();
    return comm_.gather(mine, deadline);
  }
  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) override {
    if (!in_gather_) stop();
    return comm_.scatter(std::move(parts), deadline);
  }

 private:
  [[noreturn]] static void stop() {
    throw Error(ErrorCode::kInterrupted, "SIGTERM came")
        .with_cause(std::make_exception_ptr(std::runtime_error("SIGTERM came")));
  }
  bool in_gather_;
};

TEST(Rounds, WhatAHandlerThrowsInACollectiveReachesTheOthersAsItIsWithItsRank) {
  for (const int thrower : {0, 1}) {
    for (const bool in_gather : {false, true}) {
      const auto errors = run_ranks_collect(kRanks, [&](const Communicator& plain) {
        const Communicator comm =
            plain.rank() == thrower
                ? Communicator(std::make_shared<ThrowsWhileWaiting>(plain, in_gather))
                : plain;
        Rounds rounds(comm, "save", "a", plenty());
        rounds.run("planning", nothing, no_answers);
        rounds.run("writing", nothing, no_answers);
      });
      for (int rank = 0; rank < kRanks; ++rank) {
        ASSERT_TRUE(errors[rank]) << rank;
        try {
          std::rethrow_exception(errors[rank]);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInterrupted) << error.what();
          EXPECT_EQ(error.message(), "SIGTERM came");
          EXPECT_EQ(error.cause() != nullptr, rank == thrower);
          if (rank != thrower) {
            EXPECT_EQ(error.rank(), thrower) << error.what();
          }
        }
      }
    }
  }
}

TEST(Rounds, AnOutcomeOfTheLastRoundCountsThoughItCouldNotBeDelivered) {
  run_ranks(kRanks, [](const Communicator& plain) {
    const Communicator comm(std::make_shared<LosesAnOutcome>(plain));
    Rounds rounds(comm, "save", "a", plenty());
    rounds.run_last("publishing", nothing, no_answers);
  });
}

TEST(Rounds, AnExceptionOfTheCallersCodeIsRethrownAndReportedToTheOthers) {
  for (int thrower : {0, 2}) {
    const auto errors = run_ranks_collect(kRanks, [&](const Communicator& comm) {
      Rounds rounds(comm, "save", "a", plenty());
      rounds.run(
          "planning",
          [&](Deadline) -> Bytes {
            if (comm.rank() == thrower) throw std::out_of_range("no such layer");
            return {};
          },
          no_answers);
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_NE(errors[static_cast<size_t>(rank)], nullptr);
      try {
        std::rethrow_exception(errors[static_cast<size_t>(rank)]);
      } catch (const std::out_of_range&) {
        EXPECT_EQ(rank, thrower);
      } catch (const Error& error) {
        EXPECT_NE(rank, thrower);
        EXPECT_EQ(error.code(), ErrorCode::kInterrupted);
        EXPECT_EQ(error.rank(), thrower);
        EXPECT_THAT(error.message(), HasSubstr("no such layer"));
      }
    }
  }
}

TEST(Rounds, AnExceptionInTheCoordinatorsStepIsRethrownThere) {
  const auto texts = failures(kRanks, [](const Communicator& comm) {
    Rounds rounds(comm, "save", "a", plenty());
    rounds.run("planning", nothing, [](std::vector<Bytes>) -> std::vector<Bytes> {
      throw std::out_of_range("no such layer");
    });
  });
  EXPECT_EQ(texts[0], "no such layer");
  EXPECT_THAT(texts[1], AllOf(HasSubstr("no such layer"), HasSubstr("rank 0")));
}

void interrupt(Interrupt& interrupt) {
  interrupt.request(std::make_exception_ptr(std::runtime_error("Ctrl-C")));
}

// Rank `stopped` is interrupted while it works, or while it waits for rank 1, which is busy until
// rank `stopped` has ended.
void expect_interrupt_is_reported(int stopped, bool while_working) {
  const auto start = std::chrono::steady_clock::now();
  std::latch ended(1);
  const auto texts = failures(kRanks, [&](const Communicator& comm) {
    const auto request = std::make_shared<Interrupt>();
    const bool is_stopped = comm.rank() == stopped;
    Rounds rounds(comm, "save", "a", is_stopped ? plenty().with_interrupt(request) : plenty());
    std::jthread stopper;
    if (is_stopped) {
      stopper = std::jthread([request] {
        std::this_thread::sleep_for(milliseconds(50));
        interrupt(*request);
      });
    }
    const auto busy = [&](Deadline until) -> Bytes {
      while (while_working && is_stopped && !until.expired()) {
        std::this_thread::sleep_for(milliseconds(5));
      }
      if (!while_working && comm.rank() == 1) ended.wait();
      return {};
    };
    try {
      rounds.run("writing", busy, no_answers);
      rounds.run_last("publishing", nothing, no_answers);
    } catch (...) {
      if (is_stopped) ended.count_down();
      throw;
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_EQ(texts[static_cast<size_t>(stopped)], "Ctrl-C");
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == stopped) continue;
    EXPECT_THAT(texts[static_cast<size_t>(rank)],
                AllOf(HasSubstr("Ctrl-C"), HasSubstr("rank " + std::to_string(stopped))));
  }
}

TEST(Rounds, AnInterruptEndsTheCallOnEveryRankBeforeTheDeadline) {
  for (int stopped : {0, 2}) {
    expect_interrupt_is_reported(stopped, false);
    expect_interrupt_is_reported(stopped, true);
  }
}

TEST(Rounds, WhoIsInterruptedAfterItAgreedToTheLastRoundTakesNothingFromTheOthers) {
  const auto request = std::make_shared<Interrupt>();
  std::latch ended(1);
  const auto texts = failures(kRanks, [&](const Communicator& comm) {
    const bool is_stopped = comm.rank() == 2;
    Rounds rounds(comm, "save", "a", is_stopped ? plenty().with_interrupt(request) : plenty());
    try {
      rounds.run_last("publishing", nothing, [&](std::vector<Bytes>) {
        interrupt(*request);  // all ranks have agreed
        ended.wait();
        return std::vector<Bytes>();
      });
    } catch (...) {
      if (is_stopped) ended.count_down();
      throw;
    }
  });
  EXPECT_EQ(texts[0], "");
  EXPECT_EQ(texts[1], "");
  EXPECT_EQ(texts[2], "Ctrl-C");
}

}  // namespace tilestone::engine::rounds_test
