// Saves by real processes: stopped while they publish, killed and restarted.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <optional>
#include <string>

#include "tilestone/comm/communicator.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/engine/session.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::save_processes_test {

constexpr const char* kToken = "a run of a test";

SaveOptions by_files(int rank, int ranks, bool wait = false) {
  SaveOptions options;
  options.by_files = ByFiles{rank, ranks, kToken, 0, wait};
  options.timeout = 30;
  options.resources.threads = 1;
  return options;
}

StateDict state_of(int rank, int64_t first) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, first + 8 * rank), {{0, rank, 2}});
  state["p"] = counting(DType::kInt64, {3}, first);
  state["step"] = Value(first);
  return state;
}

// Forks a child that exits with the result of `body`.
pid_t forked(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    ::_exit(body());
  } catch (...) {
    ::_exit(99);
  }
}

int ended(pid_t child) {
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

void expect_whole(const Location& location, int64_t first, int ranks) {
  expect_rows(location, first, ranks);
  EXPECT_TRUE(Checkpoint::open(location).verify().ok());
  EXPECT_TRUE(find_unpublished(location).empty());
}

// ---- A publisher that is stopped

// The rename before which it is stopped: the `count`-th one to a name with this ending.
struct Stop {
  const char* end_of_name;
  int count;
};

TEST(SaveProcesses, APublisherThatIsStoppedAndGoesOnAfterOthersHavePublishedChangesNothing) {
  for (const Stop& stop : {Stop{"/merged", 1}, Stop{".manifest", 1}, Stop{".outcome", 1},
                           Stop{".metadata", 1}, Stop{".outcome", 2}}) {
    SCOPED_TRACE(std::string(stop.end_of_name) + " " + std::to_string(stop.count));
    const TempDirectory folder;
    const Location location(folder.path());
    save(state_of(0, 3), location, by_files(0, 2));
    const pid_t child = forked([&] {
      int seen = 0;
      const auto disk =
          FaultDisk::create(posix_storage(folder.path()), [&](const StorageCall& call) {
            const bool here = call.op == StorageOp::kRename && call.to.ends_with(stop.end_of_name);
            if (here && ++seen == stop.count) ::raise(SIGSTOP);
            return FaultAction::pass();
          });
      const Location own(disk->storage());
      return save(state_of(1, 3), own, by_files(1, 2)).published ? 0 : 1;
    });
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
    ASSERT_TRUE(WIFSTOPPED(status)) << status;
    // A rank that waits takes over.
    EXPECT_TRUE(save(state_of(0, 3), location, by_files(0, 2, true)).published);
    expect_whole(location, 3, 2);
    const Bytes index = read_file(location.storage(), ".metadata", UINT64_MAX);
    ASSERT_EQ(::kill(child, SIGCONT), 0);
    EXPECT_EQ(ended(child), 0);
    EXPECT_EQ(read_file(location.storage(), ".metadata", UINT64_MAX), index);
    expect_whole(location, 3, 2);
  }
}

// ---- A rank of a session that is killed between two saves

TEST(SaveProcesses, ARankOfASessionThatIsKilledGoesOnWithASessionOfTheSameToken) {
  const TempDirectory folder;
  const Location first(folder.path() + "/1"), second(folder.path() + "/2"),
      third(folder.path() + "/3");
  const auto save_in = [](Session& session, int64_t begin, const Location& location) {
    SaveOptions options;
    options.by_files = session.by_files(location);
    options.by_files->wait = false;
    return session.save(state_of(session.rank(), begin), location, options);
  };
  Session zero(0, 2, kToken);
  save_in(zero, 1, first);
  const pid_t child = forked([&] {
    Session one(1, 2, kToken);
    if (!save_in(one, 1, first).published) return 1;
    SaveOptions options;
    options.timeout = 30;
    const StateDict state = state_of(1, 2);
    SteppedSave written = begin_save(one, state, second, options).stage().write();
    ::raise(SIGKILL);
    return 2;
  });
  EXPECT_EQ(ended(child), 1000 + SIGKILL);
  Session again(1, 2, kToken);
  EXPECT_EQ(save_in(again, 1, first).bytes_written, 0u);  // there is nothing to do
  EXPECT_FALSE(save_in(again, 2, second).published);
  EXPECT_TRUE(save_in(zero, 2, second).published);
  EXPECT_FALSE(save_in(zero, 3, third).published);
  EXPECT_TRUE(save_in(again, 3, third).published);
  EXPECT_FALSE(remove_leftovers(second).empty());  // from before its restart
  expect_whole(first, 1, 2);
  expect_whole(second, 2, 2);
  expect_whole(third, 3, 2);
}

}  // namespace tilestone::save_processes_test
