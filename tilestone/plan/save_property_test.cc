// Random jobs. Compares the assignments with a painter that marks every element, and the rule with
// the exchange.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>
#include <set>

#include "tilestone/plan/save_plan.h"
#include "tilestone/state/sharded.h"

namespace tilestone::save_property_test {

using Random = std::mt19937_64;

int64_t below(Random& random, int64_t n) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
}

TensorItem item_of(const ShardedTensor& tensor) {
  return {tensor.key,        {},
          tensor.data.dtype, tensor.global_shape,
          tensor.pieces,     tensor.replica_id,
          tensor.holders,    tensor.allow_shape_mismatch};
}

// Every element of every tensor is written by exactly one of the assignments.
void expect_painted_once(const std::vector<LocalSavePlan>& plans,
                         const std::vector<Assignment>& assignments) {
  std::map<std::string, std::vector<int>> counts;
  std::map<std::string, int> empties;
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    for (const PlanTensor& tensor : plans[rank].tensors) {
      counts[tensor.key].resize(static_cast<size_t>(numel(tensor.global_shape)), 0);
    }
    for (uint32_t i : assignments[rank].chunks) {
      const PlanChunk& chunk = plans[rank].chunks.at(i);
      const PlanTensor& tensor = plans[rank].tensors[chunk.tensor];
      if (chunk.box.empty()) ++empties[tensor.key];
      const Dims strides = contiguous_strides(tensor.global_shape);
      const int64_t elements = chunk.box.numel();
      for (int64_t e = 0; e < elements; ++e) {
        int64_t rest = e;
        int64_t at = 0;
        for (size_t d = chunk.box.rank(); d-- > 0;) {
          at += (chunk.box.offset[d] + rest % chunk.box.shape[d]) * strides[d];
          rest /= chunk.box.shape[d];
        }
        ++counts[tensor.key][static_cast<size_t>(at)];
      }
    }
  }
  for (const auto& [key, count] : counts) {
    for (int times : count) ASSERT_EQ(times, 1) << key;
    ASSERT_EQ(empties[key], count.empty() ? 1 : 0) << key;
  }
}

struct Job {
  Mesh mesh;
  std::vector<LocalSavePlan> plans;
};

std::vector<Placement> random_placements(Random& random, size_t mesh_dims, size_t tensor_dims) {
  std::vector<Placement> placements;
  for (size_t m = 0; m < mesh_dims; ++m) {
    if (tensor_dims == 0 || below(random, 2) == 0) {
      placements.push_back(Replicate{});
    } else {
      placements.push_back(Shard{below(random, static_cast<int64_t>(tensor_dims))});
    }
  }
  return placements;
}

// Tensors of random shapes under random placements on a random mesh that may leave ranks out.
Job random_job(Random& random) {
  Dims shape;
  for (int64_t d = 1 + below(random, 3); d > 0; --d) shape.push_back(1 + below(random, 4));
  const auto world = static_cast<size_t>(numel(shape) + below(random, 3));
  std::vector<int> ranks(world);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shuffle(ranks.begin(), ranks.end(), random);
  ranks.resize(static_cast<size_t>(numel(shape)));
  Job job{Mesh(shape, ranks), {}};
  std::vector<Items> items(world);
  for (int t = 0; t < 12; ++t) {
    Dims global;
    for (int64_t d = below(random, 4); d > 0; --d) global.push_back(below(random, 9));
    const auto placements = random_placements(random, shape.size(), global.size());
    for (size_t r = 0; r < world; ++r) {
      const int rank = static_cast<int>(r);
      const auto at = job.mesh.coordinate(rank);
      const Dims local = at ? local_boxes(global, job.mesh, *at, placements).local_shape : Dims{0};
      items[r].tensors.push_back(item_of(ShardedTensor::from_placements(
          "t" + std::to_string(t), TensorView::allocate(DType::kFloat32, local), global, job.mesh,
          placements, rank)));
    }
  }
  for (const Items& mine : items) job.plans.push_back(make_local_plan(mine));
  return job;
}

TEST(SavePlanProperty, TheRuleAndTheExchangeGiveTheSameOwners) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const Job job = random_job(random);
    const auto exchanged = plan_save(job.plans);
    for (size_t rank = 0; rank < job.plans.size(); ++rank) {
      const Assignment ruled = plan_save_by_rule(job.plans[rank], static_cast<int>(rank));
      ASSERT_EQ(ruled.chunks, exchanged[rank].chunks) << "rank " << rank;
    }
    expect_painted_once(job.plans, exchanged);
    if (HasFatalFailure()) return;
  }
}

TEST(SavePlanProperty, UnknownHoldersAreAssignedOnceAndBalanced) {
  for (uint64_t seed = 1000; seed < 1200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Job job = random_job(random);
    for (LocalSavePlan& plan : job.plans) {
      for (PlanChunk& chunk : plan.chunks) {
        if (below(random, 2) == 0) chunk.holders = PlanChunk::kUnknown;
      }
    }
    expect_painted_once(job.plans, plan_save(job.plans));
    if (HasFatalFailure()) return;
  }
}

TEST(SavePlanProperty, FullReplicasAreBalancedWithinTheLargestChunk) {
  for (const bool known : {true, false}) {
    Random random(7);
    std::vector<int> everyone(8);
    std::iota(everyone.begin(), everyone.end(), 0);
    Items items;
    int64_t largest = 0;
    for (int t = 0; t < 100; ++t) {
      const int64_t n = 1 + below(random, 1000);
      largest = std::max(largest, n);
      ShardedTensor tensor = ShardedTensor::from_box(
          "t" + std::to_string(t), TensorView::without_data(DType::kInt8, {n}), {n}, {{0}, {n}});
      if (known) tensor.declare_replicas(everyone);
      items.tensors.push_back(item_of(tensor));
    }
    const std::vector<LocalSavePlan> plans(8, make_local_plan(items));
    std::vector<int64_t> loads;
    for (const Assignment& mine : plan_save(plans)) {
      loads.push_back(0);
      for (uint32_t i : mine.chunks) loads.back() += plans[0].chunks[i].box.numel();
    }
    const auto [least, most] = std::minmax_element(loads.begin(), loads.end());
    EXPECT_LE(*most - *least, largest / 4) << "largest " << largest << " known " << known;
  }
}

// TP x DP with parameters replicated over DP and flat optimizer ranges: 256 ranks x 200 tensors.
TEST(SavePlanScale, DenseJobWithFlatOptimizerRangesAgainstAPainter) {
  constexpr int kTp = 8;
  constexpr int kDp = 32;
  std::vector<LocalSavePlan> plans;
  for (int rank = 0; rank < kTp * kDp; ++rank) {
    const int tp = rank % kTp;
    const int dp = rank / kTp;
    std::vector<int> holders;
    for (int other = 0; other < kDp; ++other) holders.push_back(other * kTp + tp);
    Items items;
    for (int t = 0; t < 100; ++t) {
      const std::string key = "layers." + std::to_string(t);
      const Dims local{4 + t % 3, 5 + t % 7};
      const RankOffset grid[] = {{t % 2, tp, kTp}};
      ShardedTensor weight = ShardedTensor::from_rank_offsets(
          key + ".weight", TensorView::without_data(DType::kBFloat16, local), grid, {dp});
      if (t % 4 != 0) weight.declare_replicas(holders);
      items.tensors.push_back(item_of(weight));
      const int64_t elements = numel(local);
      const FlatRange range{elements * dp / kDp, elements * (dp + 1) / kDp};
      items.tensors.push_back(item_of(ShardedTensor::from_rank_offsets_flat(
          key + ".exp_avg", TensorView::without_data(DType::kFloat32, {range.end - range.begin}),
          local, range, grid)));
    }
    plans.push_back(make_local_plan(items));
  }
  expect_painted_once(plans, plan_save(plans));
}

}  // namespace tilestone::save_property_test
