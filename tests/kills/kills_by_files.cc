// Kills or stops processes that save without a communicator, at a random moment:
//
//   kills_by_files DIR ROUNDS SEED
//   kills_by_files rank DIR RANK TOKEN FIRST    one of the processes
//
// In each round three ranks save to a new location, alternately in PyTorch's dialect and in
// Megatron-Core's. Some are killed with SIGKILL or stopped. Then there must be no checkpoint or a
// whole one. Each killed or stopped rank is started again with the same token. A stopped process
// continues once the checkpoint exists, in addition to its second process. All processes must
// succeed, and the checkpoint must be whole before and after gc.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/format/dialect/dialect.h"
#include "tilestone/tilestone.h"

extern char** environ;

namespace tilestone::kills {
namespace {

constexpr int kRanks = 3;
constexpr int kTensors = 12;
constexpr int64_t kElements = 8192;  // per rank and tensor

float value_of(int64_t first, int tensor, int64_t element) {
  return static_cast<float>((first * 31 + tensor * 7 + element) % 100003);
}

StateDict state_of(int rank, int64_t first) {
  StateDict state;
  for (int t = 0; t < kTensors; ++t) {
    const std::string key = "w" + std::to_string(t);
    const TensorView row = TensorView::allocate(DType::kFloat32, {1, kElements});
    for (int64_t i = 0; i < kElements; ++i) {
      const float value = value_of(first, t, rank * kElements + i);
      std::memcpy(row.data + static_cast<size_t>(i) * sizeof value, &value, sizeof value);
    }
    state[key] = ShardedTensor::from_rank_offsets(key, row, {{0, rank, kRanks}});
  }
  state["step"] = Value(first);
  return state;
}

bool in_megatron(int64_t first) { return first % 2 == 0; }

int save_rank(const std::string& path, int rank, const std::string& token, int64_t first) {
  set_log_level(LogLevel::kOff);
  SaveOptions options;
  options.by_files = ByFiles{rank, kRanks, token};
  options.timeout = 60;
  if (in_megatron(first)) options.dialect = megatron_dialect();
  try {
    return save(state_of(rank, first), path, options).published ? 0 : 3;
  } catch (const Error& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
}

// Whether there is a checkpoint. Throws unless it is whole and the one saved from `first`.
bool is_whole(const std::string& path, int64_t first) {
  const bool switched =
      std::filesystem::exists(path + (in_megatron(first) ? "/metadata.json" : "/.metadata"));
  std::optional<Checkpoint> checkpoint;
  try {
    checkpoint = Checkpoint::open(path);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound || switched) throw;
    return false;
  }
  if (!checkpoint->verify().ok()) throw std::runtime_error("the checkpoint is damaged");
  const auto common = checkpoint->common();
  if (common.has_value() != in_megatron(first)) throw std::runtime_error("another dialect");
  const Value step = common ? *common->find("step") : checkpoint->read_object("step");
  if (step != Value(first)) throw std::runtime_error("another save's");
  for (int t = 0; t < kTensors; ++t) {
    const TensorView found = checkpoint->read("w" + std::to_string(t));
    for (int64_t i = 0; i < kRanks * kElements; ++i) {
      float value = 0;
      std::memcpy(&value, found.data + static_cast<size_t>(i) * sizeof value, sizeof value);
      if (value != value_of(first, t, i)) throw std::runtime_error("an element is wrong");
    }
  }
  return true;
}

class Round {
 public:
  Round(std::string path, int64_t first, std::mt19937_64& random, int& strikes)
      : path_(std::move(path)),
        token_("the run " + std::to_string(first)),
        first_(first),
        random_(random),
        strikes_(strikes) {}
  ~Round() {
    for (const pid_t pid : running_) ::kill(pid, SIGKILL);
    for (const pid_t pid : running_) ::waitpid(pid, nullptr, 0);
    std::filesystem::remove_all(path_);
  }

  // Runs the round. Returns whether a checkpoint already existed when ranks were killed or stopped.
  bool run() {
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(start(rank));
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300000));
    const bool stops = random_() % 3 == 0;
    std::vector<int> struck;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (random_() % 2 == 0) struck.push_back(rank);
    }
    strikes_ += static_cast<int>(struck.size());
    for (const int rank : struck)
      ::kill(ranks[static_cast<size_t>(rank)], stops ? SIGSTOP : SIGKILL);
    const bool stood = is_whole(path_, first_);
    std::vector<pid_t> stopped;
    for (const int rank : struck) {
      const pid_t before = ranks[static_cast<size_t>(rank)];
      if (stops) stopped.push_back(before);
      if (!stops) end(before, true);
      ranks[static_cast<size_t>(rank)] = start(rank);
    }
    for (const pid_t pid : ranks) end(pid, false);
    if (!is_whole(path_, first_)) throw std::runtime_error("no checkpoint");
    for (const pid_t pid : stopped) ::kill(pid, SIGCONT);
    for (const pid_t pid : stopped) end(pid, false);
    remove_leftovers(path_);
    if (!is_whole(path_, first_)) throw std::runtime_error("no checkpoint after gc");
    if (!find_unpublished(path_).empty())
      throw std::runtime_error("files of an unpublished save remain after gc");
    return stood;
  }

 private:
  pid_t start(int rank) {
    std::vector<std::string> words = {"/proc/self/exe",     "rank", path_,
                                      std::to_string(rank), token_, std::to_string(first_)};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_t pid = 0;
    if (::posix_spawn(&pid, argv[0], nullptr, nullptr, argv.data(), environ) != 0) {
      throw std::runtime_error("can't start a rank");
    }
    running_.push_back(pid);
    return pid;
  }

  void end(pid_t pid, bool killed) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    std::erase(running_, pid);
    if (killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) return;
    throw std::runtime_error("a rank ended with status " + std::to_string(status));
  }

  const std::string path_, token_;
  const int64_t first_;
  std::mt19937_64& random_;
  int& strikes_;
  std::vector<pid_t> running_;
};

}  // namespace
}  // namespace tilestone::kills

int main(int argc, char** argv) {
  using namespace tilestone::kills;
  if (argc == 6 && std::string(argv[1]) == "rank") {
    return save_rank(argv[2], std::stoi(argv[3]), argv[4], std::stoll(argv[5]));
  }
  if (argc != 4) {
    std::fprintf(stderr, "usage: kills_by_files DIR ROUNDS SEED\n");
    return 2;
  }
  std::mt19937_64 random(std::stoull(argv[3]));
  int stood = 0;
  int strikes = 0;
  int64_t round = 0;
  try {
    for (; round < std::stoll(argv[2]); ++round) {
      stood += Round(std::string(argv[1]) + "/" + std::to_string(round), round + 1, random, strikes)
                   .run();
    }
    std::printf(
        "%d kills: of ranks that save by files, in %lld rounds; in %d of them a checkpoint "
        "existed\n",
        strikes, static_cast<long long>(round), stood);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "round %lld, seed %s: %s\n", static_cast<long long>(round), argv[3],
                 error.what());
    return 1;
  }
}
