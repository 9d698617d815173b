// The data files that the ranks of a restart open, and the bytes that they read, if the save made
// local copies within the model-parallel groups of several data-parallel replicas.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::restart_files_test {

using TwoPhase = Reading::TwoPhase;

enum class Way { kExchange, kFiles };

struct World {
  int tp = 1, pp = 1, dp = 1;
  int ranks() const { return tp * pp * dp; }
};

struct Place {
  int tp = 0, pp = 0, dp = 0;
};

// Megatron's order of ranks.
Place place_of(const World& world, int rank) {
  return {rank % world.tp, rank / (world.tp * world.dp), rank / world.tp % world.dp};
}

std::vector<int> model_parallel_group(const World& world, int rank) {
  std::vector<int> group;
  for (int r = 0; r < world.ranks(); ++r) {
    if (place_of(world, r).dp == place_of(world, rank).dp) group.push_back(r);
  }
  return group;
}

constexpr int kLayers = 4;
constexpr int64_t kWidth = 96;

// What a rank of a GPT has: Megatron's replica ids, and the holders too if `declared`.
class StateMaker {
 public:
  StateMaker(const World& world, int rank, bool declared, bool with_data)
      : world_(world), at_(place_of(world, rank)), declared_(declared), with_data_(with_data) {}

  StateDict make() {
    for (int layer = 0; layer < kLayers; ++layer) {
      if (layer * world_.pp / kLayers != at_.pp) continue;
      const std::string name = "layers." + std::to_string(layer) + ".";
      split(name + "qkv", {3 * kWidth, kWidth}, 0);
      split(name + "proj", {kWidth, kWidth}, 1);
      split(name + "fc1", {4 * kWidth, kWidth}, 0);
      split(name + "fc2", {kWidth, 4 * kWidth}, 1);
      whole(name + "norm0", {4 * kWidth});
      whole(name + "norm1", {4 * kWidth});
      object(name + "extra", {1}, {0}, {0, at_.tp, at_.dp});
    }
    if (at_.pp == 0 || at_.pp == world_.pp - 1) embedding();
    whole("position." + std::to_string(at_.pp), {2 * kWidth, kWidth});
    object("rng", {world_.pp, world_.tp}, {at_.pp, at_.tp}, {at_.dp});
    state_["config"] = with_data_ ? Value(7) : Value();
    return std::move(state_);
  }

 private:
  TensorView data(const Dims& shape, int64_t first) const {
    return with_data_ ? counting(DType::kFloat32, shape, first)
                      : TensorView::without_data(DType::kFloat32, shape);
  }

  // Declares as holders the ranks at which `holds` is true.
  template <typename Holds>
  void put(ShardedTensor tensor, const Holds& holds) {
    if (declared_) {
      for (int r = 0; r < world_.ranks(); ++r) {
        if (holds(place_of(world_, r))) tensor.holders.push_back(r);
      }
    }
    const std::string key = tensor.key;
    state_[key] = std::move(tensor);
  }

  void split(const std::string& key, Dims shape, int axis) {
    const auto d = static_cast<size_t>(axis);
    shape[d] /= world_.tp;
    put(ShardedTensor::from_rank_offsets(key, data(shape, at_.tp), {{axis, at_.tp, world_.tp}},
                                         {0, 0, at_.dp}),
        [&](const Place& p) { return p.tp == at_.tp && p.pp == at_.pp; });
  }

  void whole(const std::string& key, const Dims& shape) {
    put(ShardedTensor::from_rank_offsets(key, data(shape, 1000), {}, {0, at_.tp, at_.dp}),
        [&](const Place& p) { return p.pp == at_.pp; });
  }

  void embedding() {
    const int copy = at_.pp == 0 ? 0 : 1;
    put(ShardedTensor::from_rank_offsets("embedding",
                                         data({8 * kWidth / world_.tp, kWidth}, at_.tp),
                                         {{0, at_.tp, world_.tp}}, {copy, 0, at_.dp}),
        [&](const Place& p) { return p.tp == at_.tp && (p.pp == 0 || p.pp == world_.pp - 1); });
  }

  void object(const std::string& key, const Dims& shape, const Dims& offset, const Dims& replica) {
    state_[key] =
        ShardedObject::make(key, with_data_ ? Value(key) : Value(), shape, offset, replica);
  }

  const World world_;
  const Place at_;
  const bool declared_, with_data_;
  StateDict state_;
};

std::vector<int> all_ranks(const World& world) {
  std::vector<int> group(static_cast<size_t>(world.ranks()));
  std::iota(group.begin(), group.end(), 0);
  return group;
}

enum class Copy { kModelParallel, kAll };

void save_world(const World& world, Way way, bool declared, const std::shared_ptr<Storage>& to,
                Copy copy = Copy::kModelParallel) {
  run_ranks(world.ranks(), [&](Communicator comm) {
    SaveOptions options;
    options.resources.threads = 1;
    options.timeout = 60;
    if (way == Way::kFiles) {
      options.by_files = ByFiles{comm.rank(), world.ranks(), "a run of this test"};
    } else {
      options.comm = comm;
    }
    options.copies.emplace();
    options.copies->group =
        copy == Copy::kAll ? all_ranks(world) : model_parallel_group(world, comm.rank());
    save(StateMaker(world, comm.rank(), declared, true).make(), Location(to), options);
  });
}

struct Traffic {
  std::mutex mutex;
  std::vector<std::set<int>> files;  // by rank: the ranks whose data files it opens
  std::vector<uint64_t> bytes;       // by rank: that it reads from data files

  explicit Traffic(int ranks) : files(static_cast<size_t>(ranks)), bytes(files.size(), 0) {}
  void note(const StorageCall& call) {
    if (!call.name.ends_with(".distcp")) return;
    const std::lock_guard lock(mutex);
    const auto rank = static_cast<size_t>(call.client);
    if (call.op == StorageOp::kOpen) {
      files[rank].insert(parse_data_file_name(call.name)->rank);
    }
    if (call.op == StorageOp::kRead) bytes[rank] += call.size;
  }
};

// Loads what each rank has saved, and compares all elements.
void restart(const World& world, TwoPhase mode, const std::shared_ptr<Storage>& from,
             Traffic& traffic) {
  const auto disk = FaultDisk::create(from, [&](const StorageCall& call) {
    traffic.note(call);
    return FaultAction::pass();
  });
  run_ranks(world.ranks(), [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    options.timeout = 60;
    options.reading.two_phase = mode;
    const StateDict loaded = load(StateMaker(world, comm.rank(), false, false).make(),
                                  Location(disk->storage(comm.rank())), options);
    const StateDict expected = StateMaker(world, comm.rank(), false, true).make();
    for (const auto& [element, node] : expected) {
      const auto* tensor = node.get_if<ShardedTensor>();
      if (tensor == nullptr) continue;
      EXPECT_TRUE(
          same_bytes(elements(loaded.get<ShardedTensor>(tensor->key).data), elements(tensor->data)))
          << tensor->key;
    }
  });
}

// Its own file if that has anything, and those of its data-parallel peers, which have its shards.
void expect_few_files(const World& world, const Traffic& traffic) {
  for (int rank = 0; rank < world.ranks(); ++rank) {
    const Place mine = place_of(world, rank);
    for (const int writer : traffic.files[static_cast<size_t>(rank)]) {
      const Place other = place_of(world, writer);
      EXPECT_TRUE(other.tp == mine.tp && other.pp == mine.pp)
          << "rank " << rank << " opens the file of rank " << writer;
    }
  }
}

TEST(RestartFiles, ARankOpensItsOwnFileAndThoseOfItsPeersAndNoRankReadsMuchMoreThanTheMean) {
  for (const World& world :
       {World{2, 2, 2}, World{2, 1, 3}, World{4, 1, 2}, World{1, 2, 2}, World{2, 2, 1}}) {
    for (const Way way : {Way::kExchange, Way::kFiles}) {
      for (const bool declared : {true, false}) {
        const TempDirectory directory;
        const auto storage = posix_storage(directory.path());
        save_world(world, way, declared, storage);
        for (const TwoPhase mode : {TwoPhase::kAuto, TwoPhase::kAlways, TwoPhase::kNever}) {
          SCOPED_TRACE(testing::Message()
                       << world.tp << ", " << world.pp << ", " << world.dp
                       << (way == Way::kFiles ? ", by files" : "") << (declared ? ", declared" : "")
                       << ", mode " << static_cast<int>(mode));
          Traffic traffic(world.ranks());
          restart(world, mode, storage, traffic);
          expect_few_files(world, traffic);
          // By files no rank knows what the others write, and of small replicas without declared
          // holders one rank writes all. By messages, the writers of so small a checkpoint read for
          // the others nevertheless.
          const bool by_few = way == Way::kFiles || !declared;
          if (by_few && mode == TwoPhase::kAlways) continue;
          const uint64_t sum =
              std::accumulate(traffic.bytes.begin(), traffic.bytes.end(), uint64_t{0});
          EXPECT_LE(*std::max_element(traffic.bytes.begin(), traffic.bytes.end()),
                    sum / traffic.bytes.size() * 5 / 4)
              << testing::PrintToString(traffic.bytes);
        }
      }
    }
  }
}

// With copies of everything; and by messages, where the owners of the other files send its shards,
// so that it must not open them for replicas of objects.
TEST(RestartFiles, ARankOpensItsOwnFileAloneIfThatIsAllItNeeds) {
  const World world{2, 2, 2};
  for (const Copy copy : {Copy::kAll, Copy::kModelParallel}) {
    for (const Way way : {Way::kExchange, Way::kFiles}) {
      for (const bool declared : {true, false}) {
        const TempDirectory directory;
        const auto storage = posix_storage(directory.path());
        save_world(world, way, declared, storage, copy);
        for (const TwoPhase mode : {TwoPhase::kAuto, TwoPhase::kAlways, TwoPhase::kNever}) {
          if (copy == Copy::kModelParallel && mode != TwoPhase::kAlways) continue;
          SCOPED_TRACE(testing::Message()
                       << (copy == Copy::kAll ? "all" : "model-parallel")
                       << (way == Way::kFiles ? ", by files" : "") << (declared ? ", declared" : "")
                       << ", mode " << static_cast<int>(mode));
          Traffic traffic(world.ranks());
          restart(world, mode, storage, traffic);
          for (int rank = 0; rank < world.ranks(); ++rank) {
            EXPECT_EQ(traffic.files[static_cast<size_t>(rank)], std::set{rank}) << rank;
          }
        }
      }
    }
  }
}

}  // namespace tilestone::restart_files_test
