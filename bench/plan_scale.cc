// Processor time and memory of save planning for large dense jobs, in one process: TP x DP x PP
// with parameters replicated over DP and, for each, the flat range of a distributed optimizer.
//
//   plan_scale                     all cases
//   plan_scale exchange TP DP PP TENSORS
//   plan_scale rule TP DP PP TENSORS
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/sharded.h"

namespace {

using namespace tilestone;

struct Job {
  int tp = 1;
  int dp = 1;
  int pp = 1;
  int tensors = 2;  // of each rank: half parameters, half optimizer state
  int world() const { return tp * dp * pp; }
};

// Seconds of this thread's own work, which other programs on the machine don't lengthen.
class Stopwatch {
 public:
  double seconds() const { return now() - start_; }

 private:
  static double now() {
    timespec time = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  }
  double start_ = now();
};

double peak_gib() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1 << 20);
}

TensorItem item_of(const ShardedTensor& tensor) {
  TensorItem item;
  item.key = tensor.key;
  item.dtype = tensor.data.dtype;
  item.global_shape = tensor.global_shape;
  item.pieces = tensor.pieces;
  item.replica_id = tensor.replica_id;
  item.holders = tensor.holders;
  return item;
}

// Ranks are counted tp first, then dp, then pp. Every fourth parameter is a vector (a norm or a
// bias); the others are matrices that TP cuts by rows or columns.
LocalSavePlan plan_of(const Job& job, int rank, bool declare_holders) {
  const int tp = rank % job.tp;
  const int dp = rank / job.tp % job.dp;
  const int pp = rank / job.tp / job.dp;
  std::vector<int> holders;
  for (int other = 0; declare_holders && other < job.dp; ++other) {
    holders.push_back((pp * job.dp + other) * job.tp + tp);
  }
  Items items;
  for (int t = 0; t < job.tensors / 2; ++t) {
    const std::string name = "decoder.layers." + std::to_string(pp) + "." + std::to_string(t);
    const Dims local = t % 4 == 0 ? Dims{1032} : Dims{1032 + t, 4104};
    const RankOffset grid[] = {{t % 4 == 0 ? 0 : t % 2, tp, job.tp}};
    ShardedTensor weight = ShardedTensor::from_rank_offsets(
        name + ".weight", TensorView::without_data(DType::kBFloat16, local), grid, {dp});
    if (declare_holders) weight.declare_replicas(holders);
    items.tensors.push_back(item_of(weight));
    const int64_t elements = numel(local);
    const FlatRange range{elements * dp / job.dp, elements * (dp + 1) / job.dp};
    ShardedTensor state = ShardedTensor::from_rank_offsets_flat(
        "optimizer.exp_avg." + name,
        TensorView::without_data(DType::kFloat32, {range.end - range.begin}), local, range, grid);
    if (declare_holders) state.declare_replicas({rank});
    items.tensors.push_back(item_of(state));
  }
  return make_local_plan(items);
}

void print_job(const char* how, const Job& job) {
  std::printf("%-8s %6d ranks (TP %d, DP %d, PP %d) x %4d tensors: ", how, job.world(), job.tp,
              job.dp, job.pp, job.tensors);
}

void exchange(const Job& job) {
  SavePlanner planner(job.world());
  double decoding = 0;
  double planning = 0;
  uint64_t listed = 0;
  uint64_t encoded = 0;
  for (int rank = 0; rank < job.world(); ++rank) {
    const Bytes bytes = plan_of(job, rank, false).encode();
    const Stopwatch decode;
    const LocalSavePlan plan = LocalSavePlan::decode(bytes);
    decoding += decode.seconds();
    const Stopwatch add;
    planner.add(rank, plan);
    planning += add.seconds();
    listed += plan.chunks.size();
    encoded += bytes.size();
  }
  const Stopwatch finish;
  const std::vector<Assignment> assignments = planner.finish();
  const double finishing = finish.seconds();
  uint64_t written = 0;
  for (const Assignment& mine : assignments) written += mine.chunks.size();
  print_job("exchange", job);
  std::printf(
      "%.2f s (decode %.2f, add %.2f, finish %.2f), peak %.2f GiB; %llu chunks listed, %llu "
      "distinct, %.1f MB exchanged\n",
      decoding + planning + finishing, decoding, planning, finishing, peak_gib(),
      static_cast<unsigned long long>(listed), static_cast<unsigned long long>(written),
      static_cast<double>(encoded) / 1e6);
}

void rule(const Job& job) {
  const int rank = job.world() / 2;
  const LocalSavePlan plan = plan_of(job, rank, true);
  constexpr int kRounds = 200;
  std::vector<double> seconds;
  size_t written = 0;
  for (int round = 0; round < kRounds; ++round) {
    const Stopwatch watch;
    written = plan_save_by_rule(plan, rank).chunks.size();
    seconds.push_back(watch.seconds());
  }
  std::sort(seconds.begin(), seconds.end());
  print_job("rule", job);
  std::printf("one rank %.0f us (median of %d), writes %zu of %zu chunks\n",
              seconds[kRounds / 2] * 1e6, kRounds, written, plan.chunks.size());
}

int usage() {
  std::fprintf(stderr, "usage: plan_scale [exchange|rule TP DP PP TENSORS]\n");
  return 2;
}

int run(int argc, char** argv) {
  if (argc == 1) {
    rule({4, 4, 4, 1000});
    rule({8, 16, 8, 1000});
    rule({8, 128, 16, 1000});
    exchange({8, 16, 8, 500});
    exchange({8, 128, 16, 1000});
    return 0;
  }
  if (argc != 6) return usage();
  const Job job{std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5])};
  if (job.tp < 1 || job.dp < 1 || job.pp < 1 || job.tensors < 2) return usage();
  const std::string how = argv[1];
  if (how != "exchange" && how != "rule") return usage();
  how == "rule" ? rule(job) : exchange(job);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const tilestone::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
