// Measures CPU time and memory of save planning for large jobs, in one process. The state has
// parameters that are replicated over DP, and for each of them the flat range of a distributed
// optimizer. Dense: TP x DP x PP. MoE: three of four parameters are experts, stacked in 3-D tensors
// that are sharded by EP (inside DP) and by TP. Prints one JSON object per line.
//
//   plan_scale                     the cases of the benchmark's targets
//   plan_scale growth              planning by exchange over a range of ranks and tensors
//   plan_scale exchange TP DP PP TENSORS [EP]
//   plan_scale rule TP DP PP TENSORS [EP]
//   plan_scale access TP DP PP TENSORS [EP]    the check of main replicas (plan/access.h)
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/plan/access.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/sharded.h"

namespace {

using namespace tilestone;

struct Job {
  int tp = 1;
  int dp = 1;
  int pp = 1;
  int tensors = 2;  // per rank: half parameters, half optimizer state
  int ep = 1;       // divides dp; greater than 1: MoE
  int world() const { return tp * dp * pp; }
};

struct Place {
  Place(const Job& job, int rank)
      : tp(rank % job.tp), dp(rank / job.tp % job.dp), pp(rank / job.tp / job.dp) {}
  int tp, dp, pp;
};

// Measures the CPU time of this thread in seconds; other programs on the machine don't affect it.
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

// Peak memory of this program alone; getrusage would include the process that started it.
double peak_gib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / (1 << 20);
  }
  return 0;
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

// A parameter: its local shape, the grid of which it is a cell, and the ranks along DP that hold
// it, which are every step-th rank from `first` on.
struct Parameter {
  std::string name;
  Dims local;
  std::vector<RankOffset> grid;
  int first = 0;
  int step = 1;
};

constexpr int kExperts = 4;  // per tensor and rank

// Every fourth parameter is a vector (a norm or a bias). The others are matrices that TP shards by
// rows or columns, or stacks of such matrices, one for each expert.
Parameter parameter_of(const Job& job, const Place& at, int t) {
  Parameter p;
  p.name = "decoder.layers." + std::to_string(at.pp) + "." + std::to_string(t);
  if (t % 4 == 0) {
    p.local = {1032};
    p.grid = {{0, at.tp, job.tp}};
  } else if (job.ep == 1) {
    p.local = {1032 + t, 4104};
    p.grid = {{t % 2, at.tp, job.tp}};
  } else {
    p.local = {kExperts, 1032 + t, 520};
    p.grid = {{0, at.dp % job.ep, job.ep}, {1 + t % 2, at.tp, job.tp}};
    p.first = at.dp % job.ep;
    p.step = job.ep;
  }
  return p;
}

// In the rank order tp varies fastest, then dp (of which ep is the inner part), then pp.
std::vector<int> holders_of(const Job& job, const Place& at, const Parameter& p) {
  std::vector<int> holders;
  for (int dp = p.first; dp < job.dp; dp += p.step) {
    holders.push_back((at.pp * job.dp + dp) * job.tp + at.tp);
  }
  return holders;
}

LocalSavePlan plan_of(const Job& job, int rank, bool declare_holders) {
  const Place at(job, rank);
  Items items;
  for (int t = 0; t < job.tensors / 2; ++t) {
    const Parameter p = parameter_of(job, at, t);
    const int replica = at.dp / p.step;
    const int replicas = job.dp / p.step;
    ShardedTensor weight = ShardedTensor::from_rank_offsets(
        p.name + ".weight", TensorView::without_data(DType::kBFloat16, p.local), p.grid, {replica});
    if (declare_holders) weight.declare_replicas(holders_of(job, at, p));
    items.tensors.push_back(item_of(weight));
    const int64_t elements = numel(p.local);
    const FlatRange range{elements * replica / replicas, elements * (replica + 1) / replicas};
    ShardedTensor state = ShardedTensor::from_rank_offsets_flat(
        "optimizer.exp_avg." + p.name,
        TensorView::without_data(DType::kFloat32, {range.end - range.begin}), p.local, range,
        p.grid);
    if (declare_holders) state.declare_replicas({rank});
    items.tensors.push_back(item_of(state));
  }
  return make_local_plan(items);
}

void print_job(const char* how, const Job& job) {
  std::printf(
      "{\"how\": \"%s\", \"ranks\": %d, \"tp\": %d, \"dp\": %d, \"pp\": %d, \"ep\": %d, "
      "\"tensors\": %d, ",
      how, job.world(), job.tp, job.dp, job.pp, job.ep, job.tensors);
}

struct Seconds {
  double local = 0;  // making and encoding the local plans, sum over all ranks
  double add = 0;    // decoding included
  double finish = 0;
  double coordinator() const { return add + finish; }
};

// As in a save, the coordinator has all plans before it adds the first one, and frees each plan
// once it is added.
void exchange(const Job& job) {
  Seconds seconds;
  uint64_t listed = 0;
  uint64_t encoded = 0;
  std::vector<Bytes> plans;
  for (int rank = 0; rank < job.world(); ++rank) {
    const Stopwatch local;
    const LocalSavePlan plan = plan_of(job, rank, false);
    plans.push_back(plan.encode());
    seconds.local += local.seconds();
    listed += plan.chunks.size();
    encoded += plans.back().size();
  }
  const Stopwatch add;
  SavePlanner planner(job.world());
  for (int rank = 0; rank < job.world(); ++rank) {
    Bytes& plan = plans[static_cast<size_t>(rank)];
    planner.add_encoded(rank, plan);
    plan = Bytes();
  }
  seconds.add = add.seconds();
  const Stopwatch finish;
  const std::vector<Assignment> assignments = planner.finish();
  seconds.finish = finish.seconds();
  uint64_t written = 0;
  for (const Assignment& mine : assignments) written += mine.chunks.size();
  print_job("exchange", job);
  std::printf(
      "\"seconds\": %.3f, \"add\": %.3f, \"finish\": %.3f, "
      "\"local_seconds\": %.6f, \"peak_gib\": %.3f, \"listed\": %llu, \"distinct\": %llu, "
      "\"exchanged_mb\": %.1f}\n",
      seconds.coordinator(), seconds.add, seconds.finish, seconds.local / job.world(), peak_gib(),
      static_cast<unsigned long long>(listed), static_cast<unsigned long long>(written),
      static_cast<double>(encoded) / 1e6);
  std::fflush(stdout);
}

void access(const Job& job) {
  std::vector<Bytes> plans;
  uint64_t listed = 0;
  for (int rank = 0; rank < job.world(); ++rank) {
    const LocalSavePlan plan = plan_of(job, rank, false);
    plans.push_back(plan.encode());
    listed += plan.chunks.size();
  }
  const Stopwatch watch;
  check_access(std::vector<ByteView>(plans.begin(), plans.end()));
  const double seconds = watch.seconds();
  print_job("access", job);
  std::printf("\"seconds\": %.3f, \"peak_gib\": %.3f, \"listed\": %llu}\n", seconds, peak_gib(),
              static_cast<unsigned long long>(listed));
  std::fflush(stdout);
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
  std::printf("\"seconds\": %.6f, \"peak_gib\": %.3f, \"listed\": %zu, \"written\": %zu}\n",
              seconds[kRounds / 2], peak_gib(), plan.chunks.size(), written);
  std::fflush(stdout);
}

void growth() {
  for (const int dp : {1, 4, 16, 64, 128}) exchange({8, dp, 8, 200});
  for (const int tensors : {50, 100, 200, 400, 800}) exchange({8, 16, 8, tensors});
  for (const int dp : {8, 32, 128}) exchange({2, dp, 16, 200, 8});
}

int usage() {
  std::fprintf(stderr, "usage: plan_scale [growth | exchange|rule|access TP DP PP TENSORS [EP]]\n");
  return 2;
}

int run(int argc, char** argv) {
  if (argc == 1) {
    rule({4, 4, 4, 1000});
    rule({8, 16, 8, 1000});
    rule({8, 128, 16, 1000});
    access({8, 32, 8, 1000});
    access({2, 128, 8, 1000, 16});
    exchange({8, 16, 8, 500});
    exchange({2, 64, 8, 500, 16});
    exchange({8, 128, 16, 1000});
    exchange({2, 512, 16, 1000, 64});
    return 0;
  }
  const std::string how = argv[1];
  if (argc == 2 && how == "growth") {
    growth();
    return 0;
  }
  if (argc != 6 && argc != 7) return usage();
  const Job job{std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]),
                argc == 7 ? std::atoi(argv[6]) : 1};
  if (job.tp < 1 || job.dp < 1 || job.pp < 1 || job.tensors < 2) return usage();
  if (job.ep < 1 || job.dp % job.ep != 0) return usage();
  if (how == "exchange") {
    exchange(job);
  } else if (how == "rule") {
    rule(job);
  } else if (how == "access") {
    access(job);
  } else {
    return usage();
  }
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
