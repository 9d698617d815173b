// The conformance suite over MPI. All ranks run the same tests in step.
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/call.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/comm/comm_testing.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/mpi_internal.h"
#include "tilestone/comm/together_testing.h"

namespace tilestone {
namespace {

// A barrier that leaves the cores to the ranks that have not arrived yet.
void all_ranks() {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  int here = 0;
  while (MPI_Test(&request, &here, MPI_STATUS_IGNORE) == MPI_SUCCESS && !here) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Communicator split(const Communicator& world, int color) {
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, color, world.rank(), &part);
  const Communicator group = mpi_communicator(&part);
  MPI_Comm_free(&part);
  return group;
}

// Small limits for fragments and trees test every path without gigabytes of memory.
Communicator with_small_fragments() {
  const MPI_Comm world = MPI_COMM_WORLD;
  return comm_internal::mpi_communicator(&world, 30000, 2000);
}

TEST(Mpi, EveryOperation) { comm_testing::check_every_operation(mpi_world()); }

TEST(Mpi, EveryOperationInManyFragments) {
  comm_testing::check_every_operation(with_small_fragments());
}

TEST(Mpi, RandomOperations) {
  comm_testing::check_random_operations(mpi_world(), 3, 200);
  comm_testing::check_random_operations(with_small_fragments(), 4, 200);
}

TEST(Mpi, BadArgumentsAreRefused) { comm_testing::check_bad_arguments(mpi_world()); }

// MPI gives a new communicator the context of one that was freed, and with it messages that had not
// arrived when that one was freed.
TEST(Mpi, ALateNoticeOfAFreedCommunicatorDoesNotReachTheNextOne) {
  std::optional<Communicator> freed = mpi_world();
  const int rank = freed->rank();
  if (rank == 0) freed.reset();
  all_ranks();
  if (rank == 1) freed->call_port()->post({{0, Bytes(20), {}}}, Deadline::never());
  freed.reset();
  all_ranks();
  const Communicator next = mpi_world();
  if (rank == 0 && next.size() > 1) {
    const Deadline soon = Deadline::after(std::chrono::milliseconds(100));
    EXPECT_TRUE(next.call_port()->newest(soon, Deadline::never()).empty());
  }
  all_ranks();
}

TEST(Mpi, MissingCallerIsNamedAndTheGroupGoesOn) {
  const Communicator world = mpi_world();
  if (world.size() == 1) return;  // nobody to miss
  comm_testing::check_missing_caller(world, 0, all_ranks);
  comm_testing::check_missing_caller(world, world.size() - 1, all_ranks);
}

// The message is so long that MPI can't send it before the receiver takes it.
TEST(Mpi, LateSenderOfALongMessageGetsRidOfIt) {
  const Communicator world = mpi_world();
  if (world.size() == 1) return;
  const int late = world.size() - 1;
  const Bytes mine(size_t{3} << 20, std::byte{7});
  if (world.rank() != late) {
    const double seconds = world.rank() == 0 ? 0.5 : 120;
    const auto gather = [&] {
      world.gather(mine, Deadline::after(std::chrono::duration<double>(seconds)));
    };
    if (world.rank() == 0) {
      EXPECT_THROW(gather(), Error);
    } else {
      EXPECT_NO_THROW(gather());
    }
  }
  all_ranks();
  if (world.rank() == late) {
    EXPECT_NO_THROW(world.gather(mine, Deadline::after(std::chrono::seconds(120))));
  }
  comm_testing::check_random_operations(world, 5, 20);
}

TEST(Mpi, SubgroupsOfTheWorld) {
  const Communicator world = mpi_world();
  constexpr int kColumns = 3;
  const Communicator row = split(world, world.rank() / kColumns);
  const Communicator column = split(world, world.rank() % kColumns);
  EXPECT_LE(row.size(), kColumns);
  // A seed must be the same within a group. Rows and columns may use the same seed.
  comm_testing::check_two_groups(row, column, 6);
}

TEST(Mpi, RanksOutsideAGroupTakeNoPart) {
  const Communicator world = mpi_world();
  const bool inside = world.rank() % 2 == 0;
  const Communicator group = split(world, inside ? 0 : 1);
  if (inside) comm_testing::check_random_operations(group, 7, 50);
  all_arrive(world, Deadline::after(std::chrono::seconds(120)));
}

// ---- Calls ----

bool make_call(const Communicator& comm, const std::string& location, int patience_ms) {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(patience_ms));
  try {
    const Call call(comm, "save", location, deadline);
    const auto all = all_gather(comm, as_bytes(location), deadline);
    for (const Bytes& other : all) EXPECT_EQ(as_text(other), location);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// As in call_test.cc with threads, a rank skips a call, makes it twice or at another location.
TEST(MpiCalls, TheNextCallThatAllMakeWorks) {
  const Communicator world = mpi_world();
  if (world.size() == 1) return;
  constexpr int kPatience = 40;  // milliseconds
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed * 101 + static_cast<uint64_t>(world.rank()));
    const std::string location = "location " + std::to_string(seed % 3);
    const uint64_t way = random() % 6;
    if (way == 0) make_call(world, "typo " + std::to_string(world.rank()), kPatience);
    if (way >= 2) make_call(world, location, kPatience);
    if (way == 2) make_call(world, location, kPatience);
    all_ranks();
    EXPECT_TRUE(make_call(world, location, 60000)) << "seed " << seed << ", rank " << world.rank();
    all_ranks();
  }
}

TEST(MpiCalls, AbortEndsWaitingOperationsLongBeforeTheDeadline) {
  const Communicator world = mpi_world();
  if (world.size() == 1) return;
  const int aborter = world.size() - 1;
  {
    Call call(world, "save", "a", Deadline::after(std::chrono::seconds(60)));
    if (world.rank() == aborter) {
      call.abort(Error(ErrorCode::kInterrupted, "stopped"));
    } else {
      try {
        world.all_to_all(std::vector<Bytes>(static_cast<size_t>(world.size()), Bytes(100)),
                         Deadline::after(std::chrono::seconds(60)));
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInterrupted) << error.what();
        EXPECT_EQ(error.rank(), aborter);
      }
    }
  }
  all_ranks();
  EXPECT_TRUE(make_call(world, "b", 60000));
}

// Rank 0 and the last rank leave in turn. In the second half they arrive again.
TEST(MpiCalls, WhoLeavesBeforeTheOthersComeFailsThemSoonOrComesAgain) {
  const Communicator world = mpi_world();
  if (world.size() == 1) return;
  for (const auto& [leaver, again] :
       {std::pair(0, false), {world.size() - 1, false}, {0, true}, {world.size() - 1, true}}) {
    world.call_port()->memory().grace = std::chrono::duration<double>(again ? 1000 : 0.3);
    const std::string location = "left by " + std::to_string(leaver) + (again ? " for now" : "");
    if (world.rank() == leaver) {
      const auto stop = std::make_shared<Interrupt>();
      stop->request(std::make_exception_ptr(Error(ErrorCode::kInterrupted, "Ctrl-C")));
      const Deadline minute = Deadline::after(std::chrono::seconds(60));
      EXPECT_THROW(Call(world, "save", location, minute.with_interrupt(stop)), Error);
    }
    all_ranks();
    if (world.rank() == leaver && again) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (again) {
      EXPECT_TRUE(make_call(world, location, 60000)) << location << ", rank " << world.rank();
    } else if (world.rank() != leaver) {
      try {
        const Call call(world, "save", location, Deadline::after(std::chrono::seconds(60)));
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInterrupted) << error.what();
        EXPECT_EQ(error.rank(), leaver) << error.what();
      }
    }
    all_ranks();
  }
}

TEST(MpiCalls, DuplicatingACommunicatorIsBoundedByItsDeadline) {
  const Communicator world = mpi_world();
  if (world.size() == 1) return;
  // MPI's own collectives can't be used to wait here: all ranks must make them in the same order.
  if (world.rank() == 0) {
    EXPECT_THROW(mpi_world(Deadline::after(std::chrono::milliseconds(200))), Error);
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_NO_THROW(mpi_world(Deadline::after(std::chrono::seconds(60))));
  }
  EXPECT_TRUE(make_call(world, "after a late duplicate", 60000));
}

// Returns 0 if a forked child behaves correctly, else a bit for each failed check.
int use_inherited(Communicator inherited) {
  const Deadline minute = Deadline::after(std::chrono::seconds(60));
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::function<void()>> uses = {
      [&] { inherited.gather(to_bytes("x"), minute); },
      [&] { inherited.all_to_all(std::vector<Bytes>(inherited.size()), minute); },
      [&] { mpi_world(minute); },
  };
  // A group of one rank agrees on its calls without messages.
  if (inherited.size() > 1) uses.push_back([&] { Call(inherited, "save", "a location", minute); });
  int failed = 0;
  for (size_t i = 0; i < uses.size(); ++i) {
    try {
      uses[i]();
      failed |= 1 << i;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) failed |= 1 << i;
    }
  }
  inherited = Communicator();
  if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(10)) failed |= 1 << 6;
  return failed;
}

TEST(Mpi, AForkedChildIsRefusedAtOnceAndItsExitLeavesTheParentsMpiAlone) {
  const Communicator world = mpi_world();
  // A group of one rank sends no messages but counts its operations.
  const Communicator own = split(world, world.rank());
  for (const Communicator& group : {world, own}) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) std::exit(use_inherited(group));  // runs the atexit functions
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  comm_testing::check_every_operation(world);
}

TEST(Mpi, ACommunicatorMayGoBeforeTheOthersAreDoneWithTheirs) {
  const Communicator world = mpi_world();
  {
    const Communicator brief = mpi_world();
    brief.gather(to_bytes("x"), Deadline::after(std::chrono::seconds(120)));
  }
  all_ranks();
  comm_testing::check_random_operations(world, 8, 10);
}

}  // namespace
}  // namespace tilestone

int main(int argc, char** argv) {
  const tilestone::Communicator world = tilestone::mpi_world();
  if (world.rank() != 0) GTEST_FLAG_SET(brief, true);  // failures only
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
