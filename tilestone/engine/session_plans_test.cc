// Which saves of a session use the plan of an earlier one. Random changes of the state must never
// be saved by a plan that was made for another state.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/sanitized_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/session_parts_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/engine/session.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/format/zarr/zarr.h"

namespace tilestone::session_plans_test {

constexpr double kSeconds = 20;

struct TensorSpec {
  int key = 0;
  bool is_float = true;
  int64_t columns = 1;
  std::vector<int64_t> bounds;  // of the ranks' rows; the last one is the number of all rows
  bool replicated = false;
  bool declared = false;
  std::set<int> holders;  // of a replicated tensor
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;

  std::string name() const { return "t" + std::to_string(key); }
  TensorView whole(int64_t first) const {
    return counting(is_float ? DType::kFloat32 : DType::kInt64, {bounds.back(), columns},
                    first + 1000 * key);
  }
};

struct Spec {
  std::vector<TensorSpec> tensors;
  std::vector<std::set<int>> objects;  // the ranks that have "o0", "o1", ...
  friend bool operator==(const Spec&, const Spec&) = default;
};

class Mutations {
 public:
  Mutations(int ranks, uint64_t seed) : ranks_(ranks), random_(seed) {}

  Spec begin() {
    Spec spec;
    for (int i = 0; i < 4; ++i) add(spec);
    spec.objects = {some_ranks(), some_ranks()};
    return spec;
  }

  // Returns `from` with one change.
  Spec mutated(const Spec& from) {
    Spec spec = from;
    while (spec == from) change(spec);
    return spec;
  }

  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }

 private:
  std::set<int> some_ranks() {
    std::set<int> ranks;
    while (ranks.empty()) {
      for (int rank = 0; rank < ranks_; ++rank) {
        if (below(2) == 0) ranks.insert(rank);
      }
    }
    return ranks;
  }

  void add(Spec& spec) {
    TensorSpec tensor;
    tensor.key = next_key_++;
    tensor.is_float = below(2) == 0;
    tensor.columns = 1 + below(3);
    tensor.bounds = {0};
    for (int rank = 0; rank < ranks_; ++rank) {
      tensor.bounds.push_back(tensor.bounds.back() + 1 + below(3));
    }
    tensor.replicated = below(2) == 0;
    tensor.declared = below(2) == 0;
    tensor.holders = some_ranks();
    spec.tensors.push_back(tensor);
  }

  void change(Spec& spec) {
    TensorSpec& tensor = spec.tensors[static_cast<size_t>(below(int(spec.tensors.size())))];
    switch (below(10)) {
      case 0:
        tensor.key = next_key_++;
        return;
      case 1:
        tensor.is_float = !tensor.is_float;
        return;
      case 2:
        tensor.columns = 1 + below(4);
        return;
      case 3:  // a box of two ranks
        tensor.bounds[1] = below(static_cast<int>(tensor.bounds[2]) + 1);
        return;
      case 4:
        tensor.bounds.back() += 1;
        return;
      case 5:
        tensor.replicated = !tensor.replicated;
        return;
      case 6:
        tensor.holders = some_ranks();
        return;
      case 7:
        tensor.declared = !tensor.declared;
        return;
      case 8:
        spec.objects[static_cast<size_t>(below(2))] = some_ranks();
        return;
      default:
        if (below(2) == 0 && spec.tensors.size() > 1) {
          spec.tensors.erase(spec.tensors.begin() + below(int(spec.tensors.size())));
        } else {
          add(spec);
        }
    }
  }

  const int ranks_;
  std::mt19937_64 random_;
  int next_key_ = 0;
};

StateDict state_of(const Spec& spec, int rank, int64_t first) {
  StateDict state;
  for (const TensorSpec& tensor : spec.tensors) {
    const TensorView whole = tensor.whole(first);
    Box box = Box::whole(whole.shape);
    ReplicaId replica;
    if (tensor.replicated) {
      if (!tensor.holders.contains(rank)) continue;
      // If they are undeclared, only the boxes show that they are replicas.
      if (tensor.declared) replica = {rank == *tensor.holders.begin() ? 0 : rank + 1};
    } else {
      box.offset[0] = tensor.bounds[static_cast<size_t>(rank)];
      box.shape[0] = tensor.bounds[static_cast<size_t>(rank) + 1] - box.offset[0];
    }
    ShardedTensor shard =
        ShardedTensor::from_box(tensor.name(), whole.narrow(box), whole.shape, box, replica);
    if (tensor.replicated && tensor.declared) {
      shard.declare_replicas({tensor.holders.begin(), tensor.holders.end()});
    }
    state[tensor.name()] = shard;
  }
  for (size_t i = 0; i < spec.objects.size(); ++i) {
    if (spec.objects[i].contains(rank)) state["o" + std::to_string(i)] = Value(first);
  }
  return state;
}

void expect_saved(const Spec& spec, const Location& location, int64_t first) {
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_EQ(checkpoint.metadata().tensors.size(), spec.tensors.size());
  for (const TensorSpec& tensor : spec.tensors) {
    const TensorView found = checkpoint.read(tensor.name());
    const TensorView expected = tensor.whole(first);
    EXPECT_EQ(found.dtype, expected.dtype);
    EXPECT_EQ(found.shape, expected.shape);
    EXPECT_EQ(elements(found), elements(expected)) << tensor.name();
  }
  for (size_t i = 0; i < spec.objects.size(); ++i) {
    EXPECT_EQ(checkpoint.read_object("o" + std::to_string(i)), Value(first));
  }
}

constexpr size_t kSaves = kReduced ? 100 : 250;

void save_one(Session& session, const StateDict& state, const Location& location) {
  SaveOptions options;
  options.timeout = kSeconds;
  options.resources.threads = 1;
  // Objects that only some ranks have count as differing contents; such saves would all send their
  // plans.
  options.checks.common_differs = Checks::Differing::kIgnore;
  session.save(state, location, options);
}

// Returns how many saves of this rank used the plan of an earlier one.
uint64_t save_all(const std::vector<Spec>& specs, const std::vector<Location>& at,
                  const Communicator& comm) {
  Session session(comm, kSeconds);
  for (size_t i = 0; i < specs.size(); ++i) {
    const uint64_t cached = session.stats().plans_from_cache;
    save_one(session, state_of(specs[i], comm.rank(), static_cast<int64_t>(i) * 7), at[i]);
    const bool same = i > 0 && specs[i] == specs[i - 1];
    EXPECT_GE(session.stats().plans_from_cache, cached + (same ? 1 : 0)) << i;
  }
  const SessionStats stats = session.stats();
  EXPECT_EQ(stats.saves, kSaves);
  EXPECT_EQ(stats.plans_exchanged, kSaves - stats.plans_from_cache);
  return stats.plans_from_cache;
}

// Each state is the previous one, or differs from it in one thing: a key, dtype, shape, box,
// replica, holder, tensor or object, on one rank, on some or on all.
void expect_no_stale_plan(int ranks) {
  Mutations mutations(ranks, static_cast<uint64_t>(ranks));
  std::vector<Spec> specs = {mutations.begin()};
  while (specs.size() < kSaves) {
    const Spec last = specs.back();
    specs.push_back(mutations.below(3) == 0 ? last : mutations.mutated(last));
  }
  const std::vector<Location> at = memory_locations(kSaves);
  run_ranks(ranks, [&](const Communicator& comm) {
    // Most states differ from the previous one.
    EXPECT_LT(save_all(specs, at, comm), kSaves * 3 / 4);
  });
  for (size_t i = 0; i < kSaves; ++i) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks, save " + std::to_string(i));
    expect_saved(specs[i], at[i], static_cast<int64_t>(i) * 7);
  }
}

TEST(SessionPlans, NoChangeOfAnyRankIsSavedByAnEarlierPlan) {
  for (const int ranks : {2, 3}) expect_no_stale_plan(ranks);
}

// Everything that a plan depends on is in the hash of its structure; the contents of objects are
// not.
TEST(SessionPlans, EveryPartOfAPlanIsPartOfItsStructure) {
  LocalSavePlan plan;
  plan.tensors = {{"w", DType::kFloat32, {4}}};
  plan.chunks = {{0, PlanChunk::kUnknown, true, {{0}, {2}}, false}};
  plan.objects = {{"o", true, true, 7}};
  std::set<uint64_t> hashes;
  size_t count = 0;
  const auto add = [&](const std::function<void(LocalSavePlan&)>& change, int rank = 0,
                       int world = 2,
                       const std::shared_ptr<const Format>& format = torch_dist_format(),
                       const SaveOptions& options = {}) {
    engine::SaveShare share;
    engine::set_options(share, options);
    share.format = format;
    share.local = plan;
    share.rank = rank;
    share.world_size = world;
    change(share.local);
    ++count;
    hashes.insert(engine::structure_of(share));
  };
  const auto same = [](LocalSavePlan&) {};
  add(same);
  add([](LocalSavePlan& p) { p.tensors[0].key = "v"; });
  add([](LocalSavePlan& p) { p.tensors[0].dtype = DType::kInt32; });
  add([](LocalSavePlan& p) { p.tensors[0].global_shape = {5}; });
  add([](LocalSavePlan& p) { p.chunks[0].box.offset = {1}; });
  add([](LocalSavePlan& p) { p.chunks[0].box.shape = {1}; });
  add([](LocalSavePlan& p) { p.chunks[0].main_replica = false; });
  add([](LocalSavePlan& p) { p.chunks[0].common = true; });
  for (const int other : {1, 2}) {
    add([&](LocalSavePlan& p) {
      p.holder_sets = {{0, other}};
      p.chunks[0].holders = 0;
    });
  }
  add([](LocalSavePlan& p) { p.chunks.clear(); });
  add([](LocalSavePlan& p) { p.objects[0].key = "p"; });
  add([](LocalSavePlan& p) { p.objects[0].common = false; });
  add([](LocalSavePlan& p) { p.objects[0].main_replica = false; });
  add([](LocalSavePlan& p) { p.objects.clear(); });
  add(same, 1);
  add(same, 0, 3);
  add(same, 0, 2, zarr_format());
  SaveOptions validated;
  validated.checks.access = true;
  add(same, 0, 2, torch_dist_format(), validated);
  EXPECT_EQ(hashes.size(), count);
  add([](LocalSavePlan& p) { p.objects[0].content = 8; });
  EXPECT_EQ(hashes.size(), count - 1);
}

}  // namespace tilestone::session_plans_test
