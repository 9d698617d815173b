// Saves without a communicator by many ranks, simulated on one machine:
//
//   by_files ranks RANKS CHUNKS THREADS DIR    all ranks but the last one save, a few at a time
//   by_files last RANKS CHUNKS DIR             the last rank saves and publishes
//
// Each rank has its own storage over DIR, and CHUNKS tensors of 32 bytes. No rank waits for
// another. All files are real files and synced. Prints JSON: the seconds and storage calls of a
// rank's save, and the number of entries in the largest directory that a rank listed.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "counting_storage.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/tilestone.h"

namespace {

using namespace tilestone;
using Clock = std::chrono::steady_clock;

struct Job {
  int ranks = 1;
  int chunks = 1;  // per rank
  std::string folder;
};

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

double processor_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Peak memory of this program alone; getrusage would include the process that started it.
double peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) * 1024;
  }
  return 0;
}

StateDict state_of(const Job& job, int rank) {
  StateDict state;
  for (int i = 0; i < job.chunks; ++i) {
    const std::string key = "model.decoder.layers." + std::to_string(i / 10) + ".mlp.linear_" +
                            std::to_string(i % 10) + ".weight";
    const TensorView row = TensorView::allocate(DType::kFloat32, {1, 8});
    auto* const values = reinterpret_cast<float*>(row.data);
    for (int j = 0; j < 8; ++j) values[j] = static_cast<float>(rank + i + j);
    state[key] = ShardedTensor::from_rank_offsets(key, row, {{0, rank, job.ranks}});
  }
  state["step"] = Value(7);
  return state;
}

// Saves one rank through its own storage. Returns whether that save published the checkpoint.
bool save_rank(const Job& job, int rank, const std::shared_ptr<bench::CountingStorage>& storage) {
  SaveOptions options;
  options.by_files = ByFiles{rank, job.ranks, "a run of the bench", 0, false};
  options.resources.threads = 1;
  options.timeout = 600;
  return save(state_of(job, rank), Location(storage), options).published;
}

struct Cost {
  double seconds = 0;
  uint64_t calls = 0;
  uint64_t listed = 0;
  uint64_t syncs = 0;
};

// The median and the maximum of the values that `of` picks.
template <typename Of>
std::pair<double, double> spread(const std::vector<Cost>& costs, const Of& of) {
  std::vector<double> values;
  for (const Cost& cost : costs) values.push_back(static_cast<double>(of(cost)));
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.back()};
}

std::vector<Cost> save_all_but_last(const Job& job, int threads) {
  std::vector<int> order;
  for (int rank = 0; rank + 1 < job.ranks; ++rank) order.push_back(rank);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  std::vector<Cost> costs(order.size());
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::string failure;
  const auto work = [&] {
    try {
      for (size_t i = next++; i < order.size(); i = next++) {
        const auto storage = bench::CountingStorage::over(job.folder);
        const auto begin = Clock::now();
        save_rank(job, order[i], storage);
        costs[i] = {seconds(begin, Clock::now()), storage->calls(), storage->most_listed(),
                    storage->syncs()};
      }
    } catch (const Error& error) {
      std::lock_guard lock(mutex);
      failure = error.what();
      next = order.size();
    }
  };
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) pool.emplace_back(work);
  for (std::thread& thread : pool) thread.join();
  if (!failure.empty()) throw Error(ErrorCode::kIo, failure);
  return costs;
}

void print_ranks(const Job& job, const std::vector<Cost>& costs, double wall) {
  const auto took = spread(costs, [](const Cost& cost) { return cost.seconds; });
  const auto calls = spread(costs, [](const Cost& cost) { return cost.calls; });
  const auto listed = spread(costs, [](const Cost& cost) { return cost.listed; });
  const auto syncs = spread(costs, [](const Cost& cost) { return cost.syncs; });
  const auto storage = posix_storage(job.folder);
  uint64_t files = 0, bytes = 0;
  for (const std::string& name : storage->list(".tilestone/")) {
    ++files;
    bytes += storage->stat(name)->size;
  }
  std::printf(
      "{\"ranks\": %d, \"seconds\": %.5f, \"most_seconds\": %.5f, \"calls\": %.0f, "
      "\"most_calls\": %.0f, \"most_listed\": %.0f, \"syncs\": %.0f, \"small_files\": %llu, "
      "\"small_bytes\": %llu, \"wall\": %.2f}\n",
      job.ranks, took.first, took.second, calls.first, calls.second, listed.second, syncs.first,
      static_cast<unsigned long long>(files), static_cast<unsigned long long>(bytes), wall);
}

int save_last(const Job& job) {
  const auto storage = bench::CountingStorage::over(job.folder);
  const auto begin = Clock::now();
  if (!save_rank(job, job.ranks - 1, storage)) {
    std::fprintf(stderr, "by_files: the last rank did not publish the checkpoint\n");
    return 1;
  }
  const auto end = Clock::now();
  const double peak = peak_bytes();
  const auto reported = storage->renamed_to(".report");
  const auto published = storage->renamed_to(".metadata");
  const auto files = posix_storage(job.folder);
  std::printf(
      "{\"ranks\": %d, \"seconds\": %.4f, \"to_published\": %.4f, \"to_end\": %.4f, "
      "\"processor_seconds\": %.3f, "
      "\"calls\": %llu, \"most_listed\": %llu, \"peak_bytes\": %.0f, \"metadata_bytes\": %llu, "
      "\"small_files_left\": %zu}\n",
      job.ranks, seconds(begin, end), seconds(reported, published), seconds(reported, end),
      processor_seconds(), static_cast<unsigned long long>(storage->calls()),
      static_cast<unsigned long long>(storage->most_listed()), peak,
      static_cast<unsigned long long>(files->stat(".metadata")->size),
      files->list(".tilestone/").size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  const bool last = how == "last" && argc == 5;
  if (!last && !(how == "ranks" && argc == 6)) {
    std::fprintf(stderr,
                 "usage: by_files ranks RANKS CHUNKS THREADS DIR | last RANKS CHUNKS DIR\n");
    return 2;
  }
  const Job job{std::atoi(argv[2]), std::atoi(argv[3]), argv[argc - 1]};
  const int threads = last ? 1 : std::atoi(argv[4]);
  if (job.ranks < 2 || job.chunks < 1 || threads < 1) return 2;
  try {
    if (last) return save_last(job);
    const auto begin = Clock::now();
    const std::vector<Cost> costs = save_all_but_last(job, threads);
    print_ranks(job, costs, seconds(begin, Clock::now()));
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
