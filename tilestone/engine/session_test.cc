// Sessions: what a save keeps for the next one.
#include "tilestone/engine/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>
#include <set>

#include "tilestone/base/sanitized_testing.h"
#include "tilestone/comm/solo.h"
#include "tilestone/comm/threads.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/session_parts_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/memory_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::session_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr double kSeconds = 20;

SaveOptions within_seconds() {
  SaveOptions options;
  options.timeout = kSeconds;
  options.threads = 1;
  return options;
}

std::vector<Location> places(size_t count) {
  std::vector<Location> made;
  for (size_t i = 0; i < count; ++i) made.emplace_back(memory_storage());
  return made;
}

TEST(Session, AllRanksHaveOneTokenAndEverySessionHasItsOwn) {
  std::vector<std::string> first(3), second(3);
  run_ranks(3, [&](const Communicator& comm) {
    const auto rank = static_cast<size_t>(comm.rank());
    first[rank] = Session(comm, kSeconds).token();
    second[rank] = Session(comm, kSeconds).token();
  });
  EXPECT_THAT(first, Each(first[0]));
  EXPECT_THAT(second, Each(second[0]));
  EXPECT_NE(first[0], second[0]);
  expect_error([] { Session(2, 2, "a run of a test"); }, ErrorCode::kInvalidArgument, "rank is 2");
  expect_error([] { Session(0, 2, "short"); }, ErrorCode::kInvalidArgument, "token has 5 bytes");
}

TEST(Session, WhatHasTheStructureOfAnEarlierSaveIsSavedWithoutSendingPlans) {
  const std::vector<Location> at = places(4);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    for (int64_t i = 0; i < 3; ++i) {
      const SaveResult result =
          session.save(row_state(comm, 10 * i), at[static_cast<size_t>(i)], within_seconds());
      EXPECT_EQ(result.items_written, comm.rank() == 0 ? 3u : 1u) << i;
    }
    const SessionStats stats = session.stats();
    EXPECT_EQ(stats.saves, 3u);
    EXPECT_EQ(stats.plans_exchanged, 1u);
    EXPECT_EQ(stats.plans_from_cache, 2u);
    const uint64_t once = stats.plan_bytes_sent;
    EXPECT_GT(once, 0u);
    // Only one rank has a different object: all ranks send their plans.
    StateDict state = row_state(comm, 30);
    if (comm.rank() == 1) state["more"] = Value(1);
    session.save(state, at[3], within_seconds());
    EXPECT_EQ(session.stats().plans_exchanged, 2u);
    EXPECT_GT(session.stats().plan_bytes_sent, once);
  });
  for (int64_t i = 0; i < 4; ++i) expect_rows(at[static_cast<size_t>(i)], 10 * i, 2);
  EXPECT_EQ(Checkpoint::open(at[3]).read_object("more"), Value(1));
}

TEST(Session, RanksWithoutASessionBesideOneExchangeTheirPlans) {
  const std::vector<Location> at = places(2);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    SaveOptions options = within_seconds();
    options.comm = comm;
    for (const Location& location : at) {
      if (comm.rank() == 0) session.save(row_state(comm, 3), location, options);
      if (comm.rank() == 1) save(row_state(comm, 3), location, options);
    }
    EXPECT_EQ(session.stats().plans_from_cache, 0u);
  });
  for (const Location& location : at) expect_rows(location, 3, 2);
}

TEST(Session, ObjectsThatDifferBetweenRanksAreFoundThoughThePlanIsAnEarlierOne) {
  const std::vector<Location> at = places(2);
  const auto texts = failures(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    SaveOptions options = within_seconds();
    options.common_differs = SaveOptions::Differing::kError;
    session.save(row_state(comm, 3), at[0], options);
    StateDict state = row_state(comm, 3);
    state["step"] = Value(comm.rank());
    session.save(state, at[1], options);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("not the same on all ranks"), HasSubstr("step"))));
}

// Finding the key of the difference needs the plans. So the ranks send them at once from then on,
// as without a session.
TEST(Session, ObjectsThatAlwaysDifferTakeOneMoreRoundOnce) {
  const std::vector<Location> at = places(4);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    for (const Location& location : at) {
      StateDict state = row_state(comm, 3);
      state["mine"] = Value(comm.rank());
      session.save(state, location, within_seconds());
    }
    EXPECT_EQ(session.stats().plans_exchanged, 4u);
    SaveOptions options = within_seconds();
    options.common_differs = SaveOptions::Differing::kIgnore;
    options.overwrite = true;
    StateDict state = row_state(comm, 3);
    state["mine"] = Value(comm.rank());
    session.save(state, at[0], options);
    EXPECT_EQ(session.stats().plans_from_cache, 1u);
  });
  for (const Location& location : at) expect_rows(location, 3, 2);
}

// Megatron-Core's dialect compares its common state as a whole, both by exchange and by rule.
TEST(Session, ACommonStateThatDiffersIsFoundToo) {
  const std::vector<Location> at = places(3);
  const auto texts = failures(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    SaveOptions options = within_seconds();
    options.dialect = megatron_dialect();
    options.common_differs = SaveOptions::Differing::kError;
    session.save(row_state(comm, 3), at[0], options);
    session.save(row_state(comm, 5), at[1], options);
    EXPECT_EQ(session.stats().plans_from_cache, 1u);
    StateDict state = row_state(comm, 3);
    state["step"] = Value(comm.rank());
    session.save(state, at[2], options);
  });
  EXPECT_THAT(texts, Each(HasSubstr("the common state of rank 1 differs from that of rank 0")));
  expect_rows(at[1], 5, 2);
}

TEST(Session, AFormatOfGridsTakesItsGridsFromTheEarlierSave) {
  const std::vector<Location> at = places(2);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    SaveOptions options = within_seconds();
    options.format = zarr_format();
    options.dialect = megatron_dialect();
    for (int64_t i = 0; i < 2; ++i) {
      session.save(row_state(comm, i), at[static_cast<size_t>(i)], options);
    }
    EXPECT_EQ(session.stats().plans_from_cache, 1u);
  });
  for (int64_t i = 0; i < 2; ++i) expect_rows(at[static_cast<size_t>(i)], i, 2);
}

// ---- Mutations

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

// `by_rule`: makes only states that need no exchange: holders are declared, and objects are on
// every rank.
class Mutations {
 public:
  Mutations(int ranks, uint64_t seed, bool by_rule)
      : ranks_(ranks), by_rule_(by_rule), random_(seed) {}

  Spec begin() {
    Spec spec;
    for (int i = 0; i < 4; ++i) add(spec);
    spec.objects = {ranks_of_object(), ranks_of_object()};
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
  std::set<int> ranks_of_object() {
    std::set<int> ranks;
    for (int rank = 0; by_rule_ && rank < ranks_; ++rank) ranks.insert(rank);
    return by_rule_ ? ranks : some_ranks();
  }

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
    tensor.declared = by_rule_ || below(2) == 0;
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
        tensor.declared = by_rule_ || !tensor.declared;
        return;
      case 8:
        spec.objects[static_cast<size_t>(below(2))] = ranks_of_object();
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
  const bool by_rule_;
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

enum class Way { kExchange, kRule, kFiles };
constexpr size_t kSaves = kReduced ? 100 : 250;

void save_one(Session& session, const StateDict& state, const Location& location, Way way) {
  SaveOptions options = within_seconds();
  // Objects that only some ranks have count as differing contents; such saves would all send their
  // plans.
  options.common_differs = SaveOptions::Differing::kIgnore;
  if (way == Way::kRule) options.agreement = SaveOptions::Agreement::kRule;
  if (way == Way::kFiles) {
    options.by_files = session.by_files(location);
    options.by_files->wait = false;
  }
  session.save(state, location, options);
}

// Returns how many saves of this rank used the plan of an earlier one.
uint64_t save_all(const std::vector<Spec>& specs, const std::vector<Location>& at, Way way,
                  const Communicator& comm) {
  Session session(comm, kSeconds);
  for (size_t i = 0; i < specs.size(); ++i) {
    const uint64_t cached = session.stats().plans_from_cache;
    save_one(session, state_of(specs[i], comm.rank(), static_cast<int64_t>(i) * 7), at[i], way);
    const bool same = i > 0 && specs[i] == specs[i - 1];
    EXPECT_GE(session.stats().plans_from_cache, cached + (same ? 1 : 0)) << i;
  }
  const SessionStats stats = session.stats();
  EXPECT_EQ(stats.saves, kSaves);
  const uint64_t exchanged = way == Way::kExchange ? kSaves - stats.plans_from_cache : 0;
  EXPECT_EQ(stats.plans_exchanged, exchanged);
  return stats.plans_from_cache;
}

// Each state is the previous one, or differs from it in one thing: a key, dtype, shape, box,
// replica, holder, tensor or object, on one rank, on some or on all.
void expect_no_stale_plan(Way way, int ranks) {
  Mutations mutations(ranks, static_cast<uint64_t>(ranks), way != Way::kExchange);
  std::vector<Spec> specs = {mutations.begin()};
  while (specs.size() < kSaves) {
    const Spec last = specs.back();
    specs.push_back(mutations.below(3) == 0 ? last : mutations.mutated(last));
  }
  const std::vector<Location> at = places(kSaves);
  run_ranks(ranks, [&](const Communicator& comm) {
    // Most states differ from the previous one.
    EXPECT_LT(save_all(specs, at, way, comm), kSaves * 3 / 4);
  });
  for (size_t i = 0; i < kSaves; ++i) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks, save " + std::to_string(i));
    expect_saved(specs[i], at[i], static_cast<int64_t>(i) * 7);
  }
}

TEST(Session, NoChangeOfAnyRankIsSavedByAnEarlierPlan) {
  for (const int ranks : {2, 3}) expect_no_stale_plan(Way::kExchange, ranks);
}

TEST(Session, NoChangeOfAnyRankIsSavedByAnEarlierPlanByRule) {
  for (const int ranks : {2, 3}) expect_no_stale_plan(Way::kRule, ranks);
}

TEST(Session, NoChangeOfAnyRankIsSavedByAnEarlierPlanByFiles) {
  for (const int ranks : {2, 3}) expect_no_stale_plan(Way::kFiles, ranks);
}

TEST(Session, ByRuleAnUnchangedStateIsPlannedOnce) {
  for (const Way way : {Way::kRule, Way::kFiles}) {
    run_ranks(2, [&](const Communicator& comm) {
      const std::vector<Location> at = places(3);
      Session session(0, 1, "a run of a test");
      if (way == Way::kRule) session = Session(solo(), kSeconds);
      for (const Location& location : at) {
        save_one(session, row_state(solo(), comm.rank()), location, way);
      }
      EXPECT_EQ(session.stats().saves, 3u);
      EXPECT_EQ(session.stats().plans_from_cache, 2u);
      EXPECT_EQ(session.stats().plans_exchanged, 0u);
      for (const Location& location : at) expect_rows(location, comm.rank(), 1);
    });
  }
}

// A plan by exchange is not used as a plan by rule, even for the same states.
TEST(Session, APlanOfOneWayIsNotTakenForAnother) {
  const std::vector<Location> at = places(4);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    StateDict state;
    ShardedTensor all =
        ShardedTensor::from_rank_offsets("all", counting(DType::kInt64, {16}), {}, {comm.rank()});
    state["all"] = all;  // undeclared: by rule, rank 0 has the main replica
    save_one(session, state, at[0], Way::kExchange);
    save_one(session, state, at[1], Way::kRule);
    EXPECT_EQ(session.stats().plans_from_cache, 0u);
    save_one(session, state, at[2], Way::kExchange);
    save_one(session, state, at[3], Way::kRule);
    EXPECT_EQ(session.stats().plans_from_cache, 2u);
  });
  for (const Location& location : at) {
    EXPECT_EQ(elements(Checkpoint::open(location).read("all")),
              elements(counting(DType::kInt64, {16})));
  }
}

TEST(Session, ATimeoutThatIsNoneIsRefusedOnAllRanks) {
  for (const double timeout : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    expect_error([&] { Session(solo(), timeout); }, ErrorCode::kInvalidArgument, "timeout is");
    const auto texts = failures(
        2, [&](const Communicator& comm) { Session(comm, comm.rank() == 1 ? timeout : kSeconds); });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("timeout is"), HasSubstr("rank 1"))));
  }
}

// Everything that a plan depends on is in the hash of its structure; the contents of objects are
// not.
TEST(Session, EveryPartOfAPlanIsPartOfItsStructure) {
  LocalSavePlan plan;
  plan.tensors = {{"w", DType::kFloat32, {4}}};
  plan.chunks = {{0, PlanChunk::kUnknown, true, {{0}, {2}}, false}};
  plan.objects = {{"o", true, true, 7}};
  std::set<uint64_t> hashes;
  size_t count = 0;
  const auto add = [&](const std::function<void(LocalSavePlan&)>& change, int rank = 0,
                       int world = 2,
                       const std::shared_ptr<const Format>& format = torch_dist_format(),
                       const SaveOptions& options = {},
                       SaveOptions::Agreement way = SaveOptions::Agreement::kExchange) {
    engine::SaveShare share;
    engine::set_options(share, options);
    share.format = format;
    share.local = plan;
    share.rank = rank;
    share.world_size = world;
    change(share.local);
    ++count;
    hashes.insert(engine::structure_of(share, way));
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
  validated.validate_access = true;
  add(same, 0, 2, torch_dist_format(), validated);
  add(same, 0, 2, torch_dist_format(), {}, SaveOptions::Agreement::kRule);
  EXPECT_EQ(hashes.size(), count);
  add([](LocalSavePlan& p) { p.objects[0].content = 8; });
  EXPECT_EQ(hashes.size(), count - 1);
}

// ---- By files

TEST(Session, ByFilesRanksCountTheirSavesByLocation) {
  const TempDirectory folder;
  const std::vector<Location> at = {folder.path() + "/a", folder.path() + "/b",
                                    folder.path() + "/c"};
  const auto body = [&](Session& session, const Communicator& comm) {
    // Rank 1 skips a save to another location; this does not shift the numbers here.
    if (comm.rank() == 0) {
      SaveOptions alone = within_seconds();
      alone.by_files = session.by_files(at[0]);
      alone.by_files->wait = false;
      EXPECT_FALSE(session.save(row_state(comm, 1), at[0], alone).published);
    }
    SaveOptions options = within_seconds();
    options.by_files = session.by_files(at[1]);
    EXPECT_EQ(options.by_files->number, 0u);
    EXPECT_TRUE(session.save(row_state(comm, 2), at[1], options).published);
    EXPECT_EQ(session.by_files(at[1]).number, 1u);
  };
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    body(session, comm);
  });
  expect_rows(at[1], 2, 2);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm.rank(), comm.size(), "a run of a test");
    const StateDict state = row_state(comm, 3);
    EXPECT_TRUE(session.begin_save(state, at[2], within_seconds())
                    .stage(Payload::kStaged)
                    .write()
                    .report()
                    .publish()
                    .published);
  });
  expect_rows(at[2], 3, 2);
}

TEST(Session, ByFilesSavesThroughALinkAreSavesToTheDirectory) {
  const TempDirectory folder;
  const auto path = [&](const char* name) { return folder.path() + "/" + name; };
  std::filesystem::create_directory_symlink("real", path("link"));  // leads to nothing yet
  std::filesystem::create_directory_symlink(folder.path(), path("folder"));
  Session session(0, 1, "a run through links");
  EXPECT_EQ(session.by_files(path("link/x")).number, 0u);
  EXPECT_EQ(session.by_files(path("link")).number, 0u);
  EXPECT_EQ(session.by_files(path("real")).number, 1u);
  std::filesystem::create_directory(path("real"));
  EXPECT_EQ(session.by_files(path("link")).number, 2u);
  EXPECT_EQ(session.by_files(path("folder/real/")).number, 3u);
  EXPECT_EQ(session.by_files(path("folder/link/../real/new")).number, 0u);
  EXPECT_EQ(session.by_files(path("link/new")).number, 1u);
}

// ---- Memory

TEST(Session, StagingMemoryIsThatOfTheLastSaveUnlessThatIsOnItsWay) {
  engine::SessionParts parts;
  auto first = parts.lend_memory();
  first->reserve(1 << 20, nullptr);
  const void* const begin = first->take(1, std::nullopt).data();
  EXPECT_EQ(parts.lend_memory()->capacity(), 0u);
  first.reset();
  first = parts.lend_memory();
  first->reserve(1 << 19, nullptr);
  EXPECT_EQ(first->take(1, std::nullopt).data(), begin);
}

TEST(Session, ThreadsAndBuffersAreThoseOfTheLastSaveWhereItAskedForTheSame) {
  engine::KeptResources kept;
  const auto buffers = kept.buffers(1 << 24, 2, 1 << 20);
  EXPECT_EQ(kept.buffers(1 << 24, 2, 1 << 20), buffers);
  EXPECT_NE(kept.buffers(1 << 25, 2, 1 << 25), buffers);
  const auto threads = kept.threads(1);
  EXPECT_EQ(kept.threads(1), threads);
  EXPECT_EQ(kept.threads(2)->size(), 2u);
}

TEST(Session, PreparedMemoryIsEnoughForWhatIsSaved) {
  const std::vector<Location> at = places(2);
  Session session(solo());
  const StateDict state = row_state(solo(), 4);
  const uint64_t bytes = session.prepare(state);
  EXPECT_GE(bytes, 32u + 24u);
  for (const Location& location : at) {
    PlannedSave planned = session.begin_save(state, location, within_seconds());
    EXPECT_LE(planned.bytes(), bytes);
    std::move(planned).stage(Payload::kStaged).write().report().publish();
    expect_rows(location, 4, 1);
  }
}

// Two simultaneous saves of one session have separate memory.
TEST(Session, ASaveOnItsWayKeepsWhatItStaged) {
  const std::vector<Location> at = places(2);
  Session session(0, 1, "a run of a test");
  StagedSave first =
      session.begin_save(row_state(solo(), 4), at[0], within_seconds()).stage(Payload::kStaged);
  session.begin_save(row_state(solo(), 9), at[1], within_seconds())
      .stage(Payload::kStaged)
      .write()
      .report()
      .publish();
  std::move(first).write().report().publish();
  expect_rows(at[0], 4, 1);
  expect_rows(at[1], 9, 1);
}

}  // namespace tilestone::session_test
