#include "tilestone/comm/call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>
#include <utility>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/comm/call_testing.h"
#include "tilestone/comm/comm_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/comm/together_testing.h"

namespace tilestone::call_test {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;

// The error of each rank's body. The test fails if a rank has none.
std::vector<Error> errors_of(int ranks, const std::function<void(const Communicator&)>& body) {
  std::vector<Error> errors;
  for (const std::exception_ptr& raised : run_ranks_collect(ranks, body)) {
    try {
      if (raised) std::rethrow_exception(raised);
      errors.emplace_back(ErrorCode::kInternal, "no error");
    } catch (...) {
      errors.push_back(current_error());
    }
  }
  return errors;
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Sets an event once the rank has posted its hello.
class Announces final : public RelayedCalls {
 public:
  Announces(Communicator comm, Event& posted) : RelayedCalls(std::move(comm)), posted_(posted) {}

 private:
  void post(std::vector<Notice> notices, Deadline deadline) override {
    RelayedCalls::post(std::move(notices), deadline);
    posted_.set();
  }

  Event& posted_;
};

TEST(Call, OperationsAreInStepWhateverRanksDidBefore) {
  run_ranks(3, [](const Communicator& comm) {
    for (int i = 0; i < 5 * comm.rank(); ++i) {  // operations that the other ranks do not make
      failure_of([&] { comm.gather({}, Deadline::after(milliseconds(0))); });
    }
    const Call call(comm, "save", "a", plenty());
    comm_testing::check_random_operations(comm, 3, 20);
  });
}

TEST(Call, RanksAtDifferentPlacesAllLearnWhoIsWhere) {
  std::barrier<> all(3);
  const auto errors = errors_of(3, [&](const Communicator& comm) {
    const std::string text = failure_of(
        [&] { const Call call(comm, "save", comm.rank() == 1 ? "/typo" : "/good", plenty()); });
    all.arrive_and_wait();
    {
      const Call next(comm, "save", "/good", plenty());
    }
    all.arrive_and_wait();
    throw Error(ErrorCode::kMismatch, text);
  });
  for (const Error& error : errors) {
    EXPECT_THAT(error.message(), AllOf(HasSubstr("the ranks are in different calls"),
                                       HasSubstr("ranks 0 and 2: save at /good"),
                                       HasSubstr("rank 1: save at /typo")));
  }
}

TEST(Call, WhoNeverComesIsNamedOnEveryRankWithTheLikelyCause) {
  std::barrier<> all(3);
  Event posted;
  run_ranks(3, [&](const Communicator& comm) {
    const auto come = [&](const Communicator& as, Deadline deadline) {
      EXPECT_THAT(failure_of([&] { const Call call(as, "save", "a", deadline); }),
                  AllOf(HasSubstr("save at a: the deadline passed while waiting for rank 1"),
                        HasSubstr("the same group")));
    };
    if (comm.is_coordinator()) {
      posted.wait();
      come(comm, Deadline::after(milliseconds(200)));
    } else if (comm.rank() == 2) {
      come(Communicator(std::make_shared<Announces>(comm, posted)), plenty());
    }
    all.arrive_and_wait();
    const Call call(comm, "save", "b", plenty());
  });
}

TEST(Call, AbortEndsWaitingOperationsOnEveryRankLongBeforeTheDeadline) {
  for (int aborter : {0, 2}) {
    std::barrier<> all(3);
    run_ranks(3, [&](const Communicator& comm) {
      {
        Call call(comm, "save", "a", plenty());
        if (comm.rank() == aborter) {
          call.abort(Error(ErrorCode::kInterrupted, "stopped"));
        } else {
          const auto wait = [&] {
            EXPECT_THAT(failure_of([&] { comm.all_to_all(std::vector<Bytes>(3), plenty()); }),
                        AllOf(HasSubstr("stopped"), HasSubstr("rank " + std::to_string(aborter))));
          };
          EXPECT_LT(seconds_of(wait), 20);
        }
      }
      all.arrive_and_wait();
      const Call call(comm, "save", "b", plenty());
      comm_testing::check_random_operations(comm, 5, 5);
    });
  }
}

TEST(Call, AnInterruptAtTheRendezvousReachesTheOthersAndLeavesTheGroupUsable) {
  for (int stopped : {0, 1}) {
    std::barrier<> all(3);
    Event left;
    run_ranks(3, [&](const Communicator& comm) {
      const auto interrupt = std::make_shared<Interrupt>();
      std::jthread stopper;
      Deadline deadline = plenty();
      if (comm.rank() == stopped) {
        deadline = deadline.with_interrupt(interrupt);
        stopper = std::jthread([interrupt] {
          std::this_thread::sleep_for(milliseconds(100));
          interrupt->request(std::make_exception_ptr(std::runtime_error("Ctrl-C")));
        });
      }
      // Rank 2 is late at a call that rank 1 has left, and misses a call that rank 0 has left.
      if (comm.rank() == 2) left.wait();
      if (comm.rank() != 2 || stopped != 0) {
        const std::string text = failure_of([&] { const Call call(comm, "save", "a", deadline); });
        if (comm.rank() == stopped) left.set();
        EXPECT_THAT(text, HasSubstr("Ctrl-C"));
        EXPECT_EQ(text == "Ctrl-C", comm.rank() == stopped);  // the original
      }
      all.arrive_and_wait();
      const Call call(comm, "save", "b", plenty());
      comm_testing::check_random_operations(comm, 6, 5);
    });
  }
}

// A signal handler throws on the coordinator after it has answered the others.
class ThrowsAfterAnswering final : public RelayedCalls {
 public:
  using RelayedCalls::RelayedCalls;

 private:
  void post(std::vector<Notice> notices, Deadline deadline) override {
    comm_.call_port()->post(std::move(notices), deadline);
    throw std::runtime_error("SIGTERM came");
  }
};

// A signal handler throws on a member that has not taken its answer yet, when the coordinator has
// begun the call.
class ThrowsBeforeItsAnswer final : public RelayedCalls {
 public:
  ThrowsBeforeItsAnswer(Communicator comm, const Event& begun)
      : RelayedCalls(std::move(comm)), begun_(begun) {}

 private:
  std::vector<Notice> newest(Deadline deadline, Deadline limit) override {
    if (std::exchange(has_thrown_, true)) return RelayedCalls::newest(deadline, limit);
    begun_.wait();
    throw std::runtime_error("SIGTERM came");
  }

  const Event& begun_;
  bool has_thrown_ = false;
};

TEST(Call, WhatIsThrownOnTheCoordinatorWhileItAnswersReachesTheOthersInTheirFirstOperation) {
  std::barrier<> all(3);
  run_ranks(3, [&](const Communicator& comm) {
    if (comm.is_coordinator()) {
      const Communicator throwing(std::make_shared<ThrowsAfterAnswering>(comm));
      EXPECT_EQ(failure_of([&] { const Call call(throwing, "save", "a", plenty()); }),
                "SIGTERM came");
    } else {
      const Call call(comm, "save", "a", plenty());
      const auto wait = [&] {
        EXPECT_EQ(failure_of([&] { comm.scatter({}, plenty()); }), "SIGTERM came (rank 0)");
      };
      EXPECT_LT(seconds_of(wait), 20);
    }
    all.arrive_and_wait();
    const Call call(comm, "save", "b", plenty());
    comm_testing::check_random_operations(comm, 4, 5);
  });
}

TEST(Call, WhatIsThrownOnAMemberBeforeItHasItsAnswerReachesTheOthersInTheirFirstOperation) {
  std::barrier<> all(3);
  Event begun;
  run_ranks(3, [&](const Communicator& comm) {
    if (comm.rank() == 1) {
      const Communicator throwing(std::make_shared<ThrowsBeforeItsAnswer>(comm, begun));
      EXPECT_EQ(failure_of([&] { const Call call(throwing, "save", "a", plenty()); }),
                "SIGTERM came");
    } else {
      const Call call(comm, "save", "a", plenty());
      if (comm.is_coordinator()) begun.set();
      EXPECT_EQ(failure_of([&] { comm.all_to_all(std::vector<Bytes>(3), plenty()); }),
                "SIGTERM came (rank 1)");
    }
    all.arrive_and_wait();
    const Call call(comm, "save", "b", plenty());
    comm_testing::check_random_operations(comm, 4, 5);
  });
}

// ---- A rank that leaves before the others arrive ----

// Arrives at the call alone and is interrupted while it waits for the other ranks.
void come_and_leave(const Communicator& comm, const std::string& location) {
  const auto interrupt = std::make_shared<Interrupt>();
  std::jthread stopper([interrupt] {
    std::this_thread::sleep_for(milliseconds(20));
    interrupt->request(std::make_exception_ptr(std::runtime_error("Ctrl-C")));
  });
  EXPECT_EQ(failure_of([&] {
              const Call call(comm, "save", location, plenty().with_interrupt(interrupt));
            }),
            "Ctrl-C");
}

void set_grace(const Communicator& comm, double seconds) {
  comm.call_port()->memory().grace = std::chrono::duration<double>(seconds);
}

constexpr double kNoEnd = 1000;  // seconds: a grace that does not end during the test

class LeftBefore : public testing::TestWithParam<int> {};  // the rank that leaves
INSTANTIATE_TEST_SUITE_P(Rank, LeftBefore, testing::Values(0, 1, 2),
                         testing::PrintToStringParamName());

TEST_P(LeftBefore, FailsWhoComesLaterLongBeforeTheDeadlineEachTimeAndOnlyAtThatCall) {
  std::barrier<> all(3);
  run_ranks(3, [&](const Communicator& comm) {
    const bool leaver = comm.rank() == GetParam();
    set_grace(comm, 0.3);
    if (leaver) come_and_leave(comm, "a");
    all.arrive_and_wait();
    for (int time = 0; time < 2 && !leaver; ++time) {
      const std::string who = "rank " + std::to_string(GetParam());
      const auto come = [&] {
        EXPECT_THAT(failure_of([&] { const Call call(comm, "save", "a", plenty()); }),
                    AllOf(HasSubstr("save at a: " + who + " left the call"), HasSubstr("Ctrl-C")));
      };
      EXPECT_LT(seconds_of(come), 20);
    }
    all.arrive_and_wait();
    if (leaver) std::this_thread::sleep_for(milliseconds(600));  // longer than the grace
    const Call call(comm, "save", "b", plenty());
    comm_testing::check_random_operations(comm, 8, 5);
  });
}

// The deadline of the coordinator passes, or that of the others if it is the coordinator that left.
TEST_P(LeftBefore, NamesTheRankAtADeadlineThatComesBeforeTheGraceIsOver) {
  std::barrier<> all(3);
  Event posted;
  const auto errors = errors_of(3, [&](const Communicator& comm) {
    set_grace(comm, kNoEnd);
    const Communicator announces(std::make_shared<Announces>(comm, posted));
    if (comm.rank() == GetParam()) come_and_leave(comm, "a");
    all.arrive_and_wait();
    std::optional<Error> error;
    try {
      if (comm.is_coordinator() && GetParam() != 0) posted.wait();
      if (comm.rank() != GetParam()) {
        const bool ends = comm.is_coordinator() || GetParam() == 0;
        const Call call(announces, "save", "a",
                        ends ? Deadline::after(milliseconds(300)) : plenty());
      }
    } catch (const Error& raised) {
      error = raised;
    }
    all.arrive_and_wait();
    if (error) throw Error(*error);
  });
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_EQ(errors[rank].code(), ErrorCode::kInterrupted) << errors[rank].what();
    EXPECT_EQ(errors[rank].rank(), GetParam()) << errors[rank].what();
  }
}

TEST_P(LeftBefore, AndComesAgainIsWaitedFor) {
  std::barrier<> all(3);
  run_ranks(3, [&](const Communicator& comm) {
    set_grace(comm, kNoEnd);
    const bool leaver = comm.rank() == GetParam();
    if (leaver) come_and_leave(comm, "a");
    all.arrive_and_wait();
    if (leaver) std::this_thread::sleep_for(milliseconds(100));
    const Call call(comm, "save", "a", plenty());
    comm_testing::check_random_operations(comm, 9, 5);
  });
}

TEST_P(LeftBefore, AndComesAgainEndsTheGraceThoughAnotherRankIsMuchLater) {
  std::barrier<> all(3);
  const int late = (GetParam() + 1) % 3;
  run_ranks(3, [&](const Communicator& comm) {
    set_grace(comm, 0.3);
    const bool leaver = comm.rank() == GetParam();
    if (leaver) come_and_leave(comm, "a");
    all.arrive_and_wait();
    if (comm.rank() == late) std::this_thread::sleep_for(milliseconds(900));
    const Call call(comm, "save", "a", plenty());
    comm_testing::check_random_operations(comm, 10, 5);
  });
}

// Delivers the first notice at once, and the newest of the others when they are released.
class Withholds final : public RelayedCalls {
 public:
  using RelayedCalls::RelayedCalls;
  void release() { RelayedCalls::post(std::move(kept_), plenty()); }

 private:
  void post(std::vector<Notice> notices, Deadline deadline) override {
    if (std::exchange(is_first_, false)) return RelayedCalls::post(std::move(notices), deadline);
    kept_ = std::move(notices);
  }

  bool is_first_ = true;
  std::vector<Notice> kept_;
};

TEST(Call, AWithdrawalThatComesTooLateFailsTheCallThatHasBegunWithoutItsRankAndNoOther) {
  std::barrier<> all(3);
  Event ended;
  run_ranks(3, [&](const Communicator& comm) {
    const auto late = std::make_shared<Withholds>(comm);
    const Communicator own = comm.rank() == 2 ? Communicator(late) : comm;
    if (comm.rank() == 2) come_and_leave(own, "a");
    all.arrive_and_wait();
    if (comm.rank() < 2) {
      const Call call(own, "save", "a", plenty());
      EXPECT_THAT(failure_of([&] { own.all_to_all(std::vector<Bytes>(3), plenty()); }),
                  HasSubstr("rank 2 had left the call"));
      if (comm.rank() == 0) ended.set();
    }
    std::jthread releases;
    if (comm.rank() == 2) releases = std::jthread([&] { ended.wait(), late->release(); });
    const Call call(own, "save", "a", plenty());
    comm_testing::check_random_operations(own, 12, 3);
  });
}

TEST(Call, CallsOfTwoThreadsOfOneRankFollowOneAnother) {
  const std::vector<Communicator> group = threads(2);
  std::atomic<int> inside = 0;
  const auto use = [&](int rank) {
    for (int i = 0; i < 50; ++i) {
      const Call call(group[rank], "save", "a", plenty());
      EXPECT_LE(++inside, 2);
      comm_testing::check_random_operations(group[rank], 7, 3);
      --inside;
    }
  };
  std::vector<std::jthread> users;
  for (int user = 0; user < 4; ++user) users.emplace_back([&, user] { use(user / 2); });
}

TEST(Call, ThreadsOfTwoRanksInOtherOrderGetAnErrorAtOnce) {
  const std::vector<Communicator> group = threads(2);
  const Communicator other = group[1];
  std::jthread second([&] {
    EXPECT_THAT(failure_of([&] { const Call call(other, "save", "b", plenty()); }),
                HasSubstr("different calls"));
  });
  EXPECT_THAT(failure_of([&] { const Call call(group[0], "save", "a", plenty()); }),
              HasSubstr("different calls"));
}

TEST(Call, ACallInsideACallOfTheSameThreadIsRefused) {
  run_ranks(2, [](const Communicator& comm) {
    const Call call(comm, "save", "a", plenty());
    EXPECT_THAT(failure_of([&] { const Call inner(comm, "save", "b", plenty()); }),
                HasSubstr("already"));
    all_arrive(comm, plenty());
  });
}

TEST(Call, AloneNothingIsAgreed) {
  const Call call(Communicator(), "save", "a", Deadline::after(milliseconds(-1)));
}

}  // namespace tilestone::call_test
