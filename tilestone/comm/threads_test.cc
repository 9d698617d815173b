#include "tilestone/comm/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <stdexcept>
#include <vector>

#include "tilestone/base/error_testing.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/comm/comm_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/comm/together_testing.h"

namespace tilestone::threads_test {

using testing::HasSubstr;

Deadline plenty() { return Deadline::after(std::chrono::seconds(120)); }

class ThreadsConformance : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ThreadsConformance,
                         testing::ValuesIn(kSlowBytes ? std::vector{2, 7}
                                                      : std::vector{1, 2, 3, 4, 7}),
                         testing::PrintToStringParamName());

TEST_P(ThreadsConformance, EveryOperation) {
  run_ranks(GetParam(), comm_testing::check_every_operation);
}

TEST_P(ThreadsConformance, RandomOperations) {
  run_ranks(GetParam(),
            [](const Communicator& comm) { comm_testing::check_random_operations(comm, 1, 200); });
}

TEST_P(ThreadsConformance, BadArgumentsAreRefused) {
  run_ranks(GetParam(), comm_testing::check_bad_arguments);
}

TEST_P(ThreadsConformance, MissingCallerIsNamedAndTheGroupGoesOn) {
  if (GetParam() == 1) return;  // nobody to miss
  for (int absent : {0, GetParam() - 1}) {
    std::barrier<> barrier(GetParam());
    run_ranks(GetParam(), [&](const Communicator& comm) {
      comm_testing::check_missing_caller(comm, absent, [&] { barrier.arrive_and_wait(); });
    });
  }
}

TEST(Threads, RanksOfTwoGroupsUseBothInTurn) {
  constexpr int kRows = 2, kColumns = 3;
  std::vector<std::vector<Communicator>> rows, columns;
  for (int r = 0; r < kRows; ++r) rows.push_back(threads(kColumns));
  for (int c = 0; c < kColumns; ++c) columns.push_back(threads(kRows));
  run_ranks(kRows * kColumns, [&](const Communicator& world) {
    const int r = world.rank() / kColumns, c = world.rank() % kColumns;
    comm_testing::check_two_groups(rows[r][c], columns[c][r], 5);
  });
}

// Checks the code and the text of the error of `call` on every rank except the one that throws.
template <typename Call>
void expect_failure_named(int ranks, int thrower, Call call) {
  const auto errors = run_ranks_collect(ranks, [&](const Communicator& comm) {
    all_arrive(comm, plenty());
    if (comm.rank() == thrower) throw std::runtime_error("no more disk");
    call(comm);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    ASSERT_NE(errors[rank], nullptr) << "rank " << rank;
    if (rank == thrower) continue;
    try {
      std::rethrow_exception(errors[rank]);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kRankFailed) << error.what();
      EXPECT_THAT(error.message(), HasSubstr("no more disk")) << "rank " << rank;
    }
  }
}

TEST(Threads, RankThatThrowsFailsThoseThatWaitForItLongBeforeTheDeadline) {
  for (int ranks : {2, 3, 4, 7}) {
    expect_failure_named(ranks, ranks - 1, [](const Communicator& comm) {
      comm.all_to_all(std::vector<Bytes>(static_cast<size_t>(comm.size())), plenty());
    });
    expect_failure_named(ranks, ranks - 1,
                         [](const Communicator& comm) { all_arrive(comm, plenty()); });
    expect_failure_named(ranks, 0, [](const Communicator& comm) { comm.scatter({}, plenty()); });
    expect_failure_named(ranks, 0, [](const Communicator& comm) { comm.broadcast({}, plenty()); });
  }
}

TEST(Threads, ErrorThatEndedARankReachesTheRootOfABroadcast) {
  const auto errors = run_ranks_collect(5, [](const Communicator& comm) {
    if (comm.rank() == 0) {
      while (true) comm.broadcast({}, plenty());  // until a rank is gone
    }
    throw Error(ErrorCode::kIo, "disk full").with_rank(comm.rank());
  });
  try {
    std::rethrow_exception(errors[0]);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRankFailed);
    EXPECT_THAT(error.message(), HasSubstr("disk full"));
  }
}

TEST(Threads, MessagesOfARankThatEndedAreStillReceived) {
  run_ranks(3, [](const Communicator& comm) {
    const Bytes mine = to_bytes("from " + std::to_string(comm.rank()));
    const std::vector<Bytes> all = comm.gather(mine, plenty());
    if (comm.rank() != 0) return;
    EXPECT_EQ(as_text(all[1]), "from 1");
    EXPECT_EQ(as_text(all[2]), "from 2");
  });
}

TEST(Threads, BroadcastReachesTheLivingWhenOneIsGone) {
  std::vector<Communicator> group = threads(3);
  group[1] = Communicator();  // releases the last handle to rank 1's end
  const Bytes verdict = to_bytes("verdict");
  EXPECT_THROW(group[0].broadcast(verdict, plenty()), Error);
  EXPECT_EQ(group[2].broadcast({}, plenty()), verdict);
}

TEST(Threads, TimeoutListsTheFirstRanksAndCountsTheRest) {
  std::vector<Communicator> group = threads(14);
  const auto gather = [&] { group[0].gather({}, Deadline::after(std::chrono::milliseconds(1))); };
  EXPECT_THAT(error_of(gather), IsError(ErrorCode::kTimeout, "", "gather",
                                        "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 5 more"));
}

TEST(Threads, ExpiredDeadlineStillTakesWhatIsThere) {
  std::vector<Communicator> group = threads(2);
  const Bytes sent = to_bytes("here already");
  group[0].broadcast(sent, Deadline::after(std::chrono::seconds(-1)));
  EXPECT_EQ(group[1].broadcast({}, Deadline::after(std::chrono::seconds(-1))), sent);
}

TEST(Threads, TheOriginalErrorIsRethrownNotAConsequenceOnALowerRank) {
  // Rank 2 throws an Error with its number, an Error without one, or another exception.
  const std::vector<std::function<void()>> failures = {
      [] { throw Error(ErrorCode::kIo, "disk full").with_rank(2); },
      [] { throw Error(ErrorCode::kIo, "disk full"); },
      [] { throw std::runtime_error("disk full"); },
  };
  for (const auto& fail : failures) {
    try {
      run_ranks(4, [&](const Communicator& comm) {
        if (comm.rank() == 2) fail();
        static_cast<void>(comm.all_to_all(std::vector<Bytes>(4), plenty()));
      });
      FAIL();
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), testing::StartsWith("disk full"));
    }
  }
}

TEST(Threads, AnExceptionThatIsThrownAfterItsConsequencesIsStillTheOriginal) {
  std::barrier others_have_thrown(3);
  try {
    run_ranks(3, [&](const Communicator& comm) {
      if (comm.rank() == 1) {
        others_have_thrown.arrive_and_wait();
        throw std::runtime_error("the caller's own");
      }
      struct Leaving {
        std::barrier<>& gate;
        ~Leaving() { gate.arrive_and_drop(); }
      };
      const Leaving leaving{others_have_thrown};
      throw Error(ErrorCode::kInterrupted, "rank 1 was stopped").with_rank(1);
    });
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "the caller's own");
  }
}

TEST(Threads, ErrorsThatBlameOneAnotherEndWithTheFirstInTime) {
  try {
    run_ranks(2, [&](const Communicator& comm) {
      if (comm.rank() == 1) throw Error(ErrorCode::kTimeout, "first").with_rank(0);
      EXPECT_THROW(static_cast<void>(comm.gather({}, plenty())), Error);  // rank 1 is gone
      throw Error(ErrorCode::kTimeout, "second").with_rank(1);
    });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.message(), "first");
  }
}

TEST(Threads, AGroupNeedsARankAndNotMoreThanThreadsCanBe) {
  int ran = 0;
  for (const int n : {0, -1, kMaxThreadRanks + 1, 1000000}) {
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { threads(n); }, [&] { run_ranks(n, [&](const Communicator&) { ++ran; }); },
             [&] { run_ranks_collect(n, [&](const Communicator&) { ++ran; }); }}) {
      try {
        call();
        FAIL() << n;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        EXPECT_THAT(error.message(), HasSubstr(std::to_string(n)));
      }
    }
  }
  EXPECT_EQ(ran, 0);
}

}  // namespace tilestone::threads_test
