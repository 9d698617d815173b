// kills SAVER DIR KIND ROUNDS SEED [MPIRUN]: starts the saver, kills it with SIGKILL at a random
// moment of its saves, and checks the result. Repeats this ROUNDS times. KIND (torch, megatron or
// zarr) is what it saves; with "async_" before it, the saver saves in the background. Without
// MPIRUN the saver is one process of three ranks. With MPIRUN it is a job of three processes, one
// of which is killed; the others must end with an error that names the killed one.
//
// After a kill each location must hold a whole checkpoint, of the last acknowledged generation or
// of one that was being saved. A later save must succeed and leave no leftovers.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kill_content.h"

extern char** environ;

namespace tilestone::kills {
namespace {

constexpr int kRanks = 3;
constexpr double kTimeout = 5;  // seconds, for each save of an MPI job

// The lines that a rank logged, and their content.
struct RankLog {
  pid_t pid = 0;
  int64_t begun = -1;
  int64_t done = -1;
  std::string failure;
};

RankLog read_log(const std::string& name) {
  std::ifstream file(name);
  std::stringstream all;
  all << file.rdbuf();
  std::string text = all.str();
  text.resize(text.rfind('\n') + 1);  // npos + 1 is 0: no whole line
  std::stringstream lines(text);
  RankLog log;
  for (std::string word; lines >> word;) {
    if (word == "pid") lines >> log.pid;
    if (word == "begin") lines >> log.begun;
    if (word == "done") lines >> log.done;
    if (word == "failed") std::getline(lines, log.failure);
  }
  return log;
}

pid_t start(std::vector<std::string> arguments) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  if (::posix_spawnp(&pid, argv[0], nullptr, nullptr, argv.data(), environ) != 0) {
    throw std::runtime_error("can't start " + arguments[0]);
  }
  return pid;
}

template <typename Condition>
void wait_until(const char* what, const Condition& condition) {
  for (int i = 0; i < 60000; ++i) {
    if (condition()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw std::runtime_error(std::string("gave up after a minute: ") + what);
}

// The results of all rounds.
struct Counts {
  int acknowledged = 0;
  int under_way = 0;
  int survivors = 0;  // ranks that named the killed one
};

class Judge {
 public:
  Judge(std::string saver, Places places, Kind kind, bool in_background, std::string mpirun,
        uint64_t seed)
      : saver_(std::move(saver)),
        places_(std::move(places)),
        kind_(kind),
        in_background_(in_background),
        mpirun_(std::move(mpirun)),
        random_(seed) {
    std::filesystem::remove_all(places_.root);
    std::filesystem::create_directories(places_.root / "steps");
  }
  ~Judge() { std::filesystem::remove_all(places_.root); }

  void round() {
    for (int rank = 0; rank < kRanks; ++rank) std::filesystem::remove(places_.log(rank));
    const pid_t job = start(command());
    try {
      strike(job);
    } catch (...) {
      end(job);
      throw;
    }
    end(job);
    judge();
  }
  const Counts& counts() const { return counts_; }

 private:
  std::vector<std::string> command() const {
    std::vector<std::string> words;
    if (!mpirun_.empty()) {
      words = {mpirun_, "--enable-recovery",   "--oversubscribe", "--allow-run-as-root",
               "-n",    std::to_string(kRanks)};
    }
    const std::string way = in_background_ ? "async_" : "";
    for (std::string word :
         {saver_, way + (mpirun_.empty() ? "threads" : "mpi"), places_.root.string(),
          std::string(to_string(kind_)), std::to_string(next_), std::to_string(kTimeout)}) {
      words.push_back(std::move(word));
    }
    return words;
  }

  // Kills the job during one of its saves, which may be the first one.
  void strike(pid_t job) {
    wait_until("no rank begins a save", [&] {
      return log_of(0).begun >= 0 && log_of(1).begun >= 0 && log_of(2).begun >= 0;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 120000));
    if (mpirun_.empty()) {
      ::kill(job, SIGKILL);
      return;
    }
    const int victim = static_cast<int>(random_() % kRanks);
    ::kill(log_of(victim).pid, SIGKILL);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      wait_until("a surviving rank does not end", [&] { return !log_of(rank).failure.empty(); });
      const std::string name = "rank " + std::to_string(victim);
      if (log_of(rank).failure.find(name) == std::string::npos) {
        throw std::runtime_error("rank " + std::to_string(rank) + " does not name " + name + ":" +
                                 log_of(rank).failure);
      }
      ++counts_.survivors;
    }
  }

  static void end(pid_t job) {
    ::kill(job, SIGTERM);  // mpirun ends the rest of its job
    int status = 0;
    ::waitpid(job, &status, 0);
  }

  RankLog log_of(int rank) const { return read_log(places_.log(rank)); }

  void judge() {
    int64_t begun = -1;
    std::map<std::string, int64_t> done = standing_;  // by location
    for (int rank = 0; rank < kRanks; ++rank) {
      const RankLog log = log_of(rank);
      begun = std::max(begun, log.begun);
      // A generation that one rank saw acknowledged must exist. So must the previous generation,
      // which has another location.
      for (int64_t g : {log.done - 1, log.done}) {
        if (g < next_) continue;
        int64_t& known = done.try_emplace(places_.location(g), -1).first->second;
        known = std::max(known, g);
      }
    }
    for (int64_t g = oldest_under_way(begun); g <= begun; ++g) {
      done.try_emplace(places_.location(g), -1);
    }
    done.try_emplace(places_.latest(), -1);
    for (const auto& [location, generation] : done) judge_location(location, generation, begun);
    std::filesystem::remove_all(places_.root / "steps");
    standing_ = {{places_.latest(), begun + 1}};
    next_ = begun + 2;
  }

  // A rank that saves in the background begins a generation while the one before is in flight.
  int64_t oldest_under_way(int64_t begun) const {
    return in_background_ ? std::max(next_, begun - 1) : begun;
  }

  void judge_location(const std::string& location, int64_t acknowledged, int64_t begun) {
    const int64_t found = whole_generation(location, kind_);
    const bool under_way =
        found >= oldest_under_way(begun) && found <= begun && places_.location(found) == location;
    if (found != acknowledged && !under_way) {
      throw std::runtime_error(location + " holds generation " + std::to_string(found) +
                               ", but generation " + std::to_string(acknowledged) +
                               " was acknowledged and " + std::to_string(begun) + " was begun");
    }
    if (places_.location(begun) == location || (under_way && found != acknowledged)) {
      ++(found == acknowledged ? counts_.acknowledged : counts_.under_way);
    }
    save_and_expect_no_leftovers(location, kind_, begun + 1);
  }

  const std::string saver_;
  const Places places_;
  const Kind kind_;
  const bool in_background_;
  const std::string mpirun_;
  std::mt19937_64 random_;
  std::map<std::string, int64_t> standing_;  // generations before the round, by location
  int64_t next_ = 0;                         // generation
  Counts counts_;
};

}  // namespace
}  // namespace tilestone::kills

int main(int argc, char** argv) {
  using namespace tilestone::kills;
  if (argc != 6 && argc != 7) {
    std::fprintf(stderr,
                 "usage: kills SAVER DIR [async_]torch|megatron|zarr ROUNDS SEED [MPIRUN]\n");
    return 2;
  }
  const uint64_t seed = std::stoull(argv[5]);
  int round = 0;
  try {
    std::string_view kind = argv[3];
    const bool in_background = kind.starts_with("async_");
    if (in_background) kind.remove_prefix(kind.find('_') + 1);
    Judge judge(argv[1], {argv[2]}, kind_named(kind), in_background, argc == 7 ? argv[6] : "",
                seed);
    for (; round < std::stoi(argv[4]); ++round) judge.round();
    const Counts& counts = judge.counts();
    std::printf(
        "%d kills: saving %s, %d found the acknowledged generation, %d the one being saved; %d "
        "surviving ranks named the killed one\n",
        round, argv[3], counts.acknowledged, counts.under_way, counts.survivors);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kill %d, seed %llu: %s\n", round, static_cast<unsigned long long>(seed),
                 error.what());
    return 1;
  }
}
