// in_background DIR full: saves in the background below DIR, whose file system has no room for it.
// in_background DIR hang PID: likewise, while the file system's process PID is stopped.
//
// Two ranks train meanwhile. The save fails on both, which the session's next save, at another
// place, says. The old checkpoint stands, and once there is room, or PID goes on, a save works.
// Prints how many steps the ranks made while the save was in flight.
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/kills/kill_content.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/comm/together_testing.h"

namespace tilestone::kills {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kFew = 1000;             // elements of a row that has room
constexpr int64_t kMany = (16 << 20) / 8;  // of one that has not: 16 MiB
constexpr double kTimeout = 2;             // seconds, of the save that hangs
constexpr double kLong = 60;

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// Holds the writing of files until it is let go.
class Hold {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

SaveOptions options_for(const Communicator& comm, double timeout) {
  SaveOptions options = options_of(Kind::kTorch);
  options.comm = comm;
  options.timeout = timeout;
  options.resources.threads = 1;
  return options;
}

// Trains until the save is over. Returns how many steps this took.
int train(const Communicator& comm, const AsyncSave& saving) {
  for (int steps = 1;; ++steps) {
    all_arrive(comm, Deadline::after(std::chrono::seconds(60)));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::byte is_over{saving.durable().done() ? std::byte{1} : std::byte{0}};
    const Deadline limit = Deadline::after(std::chrono::seconds(60));
    if (comm.broadcast(Bytes(1, is_over), limit).at(0) == std::byte{0}) continue;
    expect(saving.durable().wait(limit), "the save has ended on the coordinator only");
    return steps;
  }
}

class Test {
 public:
  Test(const std::filesystem::path& directory, pid_t stopped)
      : place_((directory / "checkpoint").string()),
        other_((std::filesystem::temp_directory_path() /
                ("in_background." + std::to_string(::getpid())))
                   .string()),
        stopped_(stopped) {}
  ~Test() {
    if (stopped_ != 0) ::kill(stopped_, SIGCONT);
    std::error_code ignored;
    std::filesystem::remove_all(other_, ignored);
  }

  void rank(const Communicator& comm) {
    Session session(comm);
    session.save(state_of(comm, 1, kFew), place_, options_for(comm, kLong));
    const AsyncSave failed = begin(comm, session);
    const int steps = train(comm, failed);
    if (comm.is_coordinator()) steps_ = steps;
    expect_told(comm, session);
    if (stopped_ != 0) {
      if (comm.is_coordinator()) expect(::kill(stopped_, SIGCONT) == 0, "can't continue");
      while (!failed.finished()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    all_arrive(comm, Deadline::after(std::chrono::seconds(60)));
    if (comm.is_coordinator()) expect(whole_generation(place_, Kind::kTorch) == 1, "the old one");
    all_arrive(comm, Deadline::after(std::chrono::seconds(60)));
    session.async_save(state_of(comm, 3, kFew), place_, options_for(comm, kLong)).result();
    if (!comm.is_coordinator()) return;
    expect(whole_generation(place_, Kind::kTorch) == 3, "the new one");
    save_and_expect_no_leftovers(place_, Kind::kTorch, 4);
  }
  int steps() const { return steps_; }

 private:
  AsyncSave begin(const Communicator& comm, Session& session) {
    SaveOptions options = options_for(comm, stopped_ != 0 ? kTimeout : kLong);
    options.progress = [this](const Progress&) { hold_.wait(); };
    AsyncSave saving = session.async_save(state_of(comm, 2, kMany), place_, options);
    all_arrive(comm, Deadline::after(std::chrono::seconds(60)));
    if (comm.is_coordinator()) {
      if (stopped_ != 0) expect(::kill(stopped_, SIGSTOP) == 0, "can't stop the file system");
      hold_.let_go();
    }
    return saving;
  }

  // Nobody has asked for the result, so the next save says so on both ranks, and the one after it
  // works.
  void expect_told(const Communicator& comm, Session& session) {
    std::string text;
    try {
      session.save(state_of(comm, 1, kFew), other_, options_for(comm, kLong));
    } catch (const Error& error) {
      text = error.what();
    }
    const bool says = text.find("an earlier asynchronous save has failed") != std::string::npos;
    const bool says_why = text.find("No space left on device") != std::string::npos;
    expect(says && says_why == (stopped_ == 0), "the next save does not say why: " + text);
    session.save(state_of(comm, 1, kFew), other_, options_for(comm, kLong));
  }

  const std::string place_, other_;
  const pid_t stopped_;
  Hold hold_;
  std::atomic<int> steps_ = 0;
};

}  // namespace
}  // namespace tilestone::kills

int main(int argc, char** argv) {
  using namespace tilestone;
  const std::string kind = argc > 2 ? argv[2] : "";
  if (!(argc == 3 && kind == "full") && !(argc == 4 && kind == "hang")) {
    std::fprintf(stderr, "usage: in_background DIR full|hang [PID]\n");
    return 2;
  }
  set_log_level(LogLevel::kOff);
  try {
    kills::Test test(argv[1], argc == 4 ? std::stoi(argv[3]) : 0);
    run_ranks(kills::kRanks, [&](const Communicator& comm) { test.rank(comm); });
    std::printf("a save in the background failed, %d steps of training meanwhile\n", test.steps());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s, %s: %s\n", argv[1], kind.c_str(), error.what());
    return 1;
  }
}
