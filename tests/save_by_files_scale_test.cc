// The cost of a save without a communicator per rank, for any number of ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::save_by_files_scale_test {

// The number of entries in the largest of the directories that contain these files.
uint64_t largest_directory(const std::vector<std::string>& names) {
  std::map<std::string, std::set<std::string>> entries;
  for (const std::string& name : names) {
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = name.find('/', begin);
      entries[name.substr(0, begin)].insert(name.substr(begin, end - begin));
    }
  }
  uint64_t most = 0;
  for (const auto& [directory, in_it] : entries) most = std::max<uint64_t>(most, in_it.size());
  return most;
}

// What a rank saves, and how; it does not wait.
struct Rows {
  Rows(int rank, int ranks) {
    state["w"] = ShardedTensor::from_rank_offsets(
        "w", counting(DType::kFloat32, {1, 8}, 3 + 8 * rank), {{0, rank, ranks}});
    state["p"] = counting(DType::kInt64, {3}, 3);
    state["step"] = int64_t{3};
    options.by_files = ByFiles{rank, ranks, "a run of a test", 0, false};
    options.resources.threads = 1;
  }
  StateDict state;
  SaveOptions options;
};

struct Costs {
  std::vector<uint64_t> calls;  // storage calls of each rank, sorted; the last to come publishes
  uint64_t most_listed = 0;     // entries of the largest directory that a rank has listed
};

// Ranks save one after another, in order or in a random order; none of them waits.
Costs costs_of(int ranks, bool shuffled) {
  const auto inner = memory_storage();
  Costs costs;
  costs.calls.resize(static_cast<size_t>(ranks));
  std::mutex mutex;  // a rank may call from several threads
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    const std::lock_guard lock(mutex);
    ++costs.calls[static_cast<size_t>(call.client)];
    if (call.op == StorageOp::kList) {
      // All entries of the directory are read, whatever the names must begin with.
      const std::string prefix(call.name);
      const std::string directory = prefix.substr(0, prefix.rfind('/') + 1);
      const uint64_t seen = largest_directory(inner->list(directory));
      costs.most_listed = std::max(costs.most_listed, seen);
    }
    return FaultAction::pass();
  });
  std::vector<int> order(static_cast<size_t>(ranks));
  std::iota(order.begin(), order.end(), 0);
  if (shuffled) std::shuffle(order.begin(), order.end(), std::mt19937_64(5));
  for (const int rank : order) {
    const Rows rows(rank, ranks);
    const SaveResult saved = save(rows.state, Location(disk->storage(rank)), rows.options);
    EXPECT_EQ(saved.published, rank == order.back());
  }
  expect_rows(Location(inner), 3, ranks);
  std::sort(costs.calls.begin(), costs.calls.end());
  return costs;
}

TEST(SaveByFilesScale, ARanksCallsDontGrowWithTheWorldAndNobodyListsMoreThanSomeGroupsEntries) {
  for (const bool shuffled : {false, true}) {
    SCOPED_TRACE(shuffled ? "in a random order" : "in their order");
    const Costs small = costs_of(64, shuffled);
    const Costs large = costs_of(256, shuffled);
    const auto median = [](const Costs& costs) { return costs.calls[costs.calls.size() / 2]; };
    EXPECT_LE(median(large), median(small) + 2);
    // A rank that completes a group opens the files of its ranks: a few calls for each rank.
    const auto completes = [](const Costs& costs) { return costs.calls[costs.calls.size() - 2]; };
    EXPECT_LE(completes(large), median(large) + 10 * 16);
    // Only the last rank does more: it reads each group's receipts, and removes what is left.
    EXPECT_LE(large.calls.back(), completes(large) + 12 * 16);
    EXPECT_LE(small.most_listed, 3u * 8);
    EXPECT_LE(large.most_listed, 3u * 16);
  }
}

// The requests that a rank of an object store makes, where all have reported when the first one
// looks, and those of a group do at the same time; sorted.
std::vector<uint64_t> requests_together(int ranks) {
  const auto objects = memory_objects();
  const auto root = static_cast<int>(std::ceil(std::sqrt(ranks)));
  std::vector<uint64_t> requests(static_cast<size_t>(ranks));
  std::mutex mutex;
  std::optional<std::barrier<>> all_have_looked;  // of a group
  const auto disk = FaultDisk::create(objects, [&](const StorageCall& call) {
    {
      const std::lock_guard lock(mutex);
      ++requests[static_cast<size_t>(call.client)];
    }
    const bool joins = call.op == StorageOp::kPut && call.name.ends_with("/joiner");
    if (joins) all_have_looked->arrive_and_wait();
    return FaultAction::pass();
  });
  std::vector<SteppedSave> saves;
  for (int rank = 0; rank < ranks; ++rank) {
    const Rows rows(rank, ranks);
    saves.push_back(
        begin_save(rows.state, Location(disk->storage(rank)), rows.options).write().report());
  }
  std::atomic<int> published = 0;
  for (auto group = saves.begin(); group < saves.end(); group += root) {
    all_have_looked.emplace(root);
    std::vector<std::jthread> threads;
    for (auto save = group; save < group + root; ++save) {
      threads.emplace_back([&, save] {
        EXPECT_NO_THROW(published += save->publish().published);
        all_have_looked->arrive_and_drop();
      });
    }
  }
  EXPECT_GE(published, 1);  // another rank of the last group may find it published
  expect_rows(Location(objects), 3, ranks);
  std::sort(requests.begin(), requests.end());
  return requests;
}

TEST(SaveByFilesScale, OfRanksThatReportTogetherToAnObjectStoreOneReadsTheReceiptsOfItsGroup) {
  const std::vector<uint64_t> small = requests_together(64), large = requests_together(1024);
  constexpr size_t kJoiners = 32;
  // But for those that join (of a group two, if one has looked before the other's mark was there),
  // and the one that has begun the save.
  const uint64_t most = large[large.size() - 2 * kJoiners - 2];
  EXPECT_LE(most, small[small.size() / 2] + 2);
  EXPECT_LE(large[large.size() - 2], most + 4 * kJoiners);
  EXPECT_LE(large.back(), most + 9 * kJoiners);
  for (const auto* each : {&small, &large}) {
    const std::string ranks = std::to_string(each->size()) + " ranks: ";
    RecordProperty(ranks + "fewest", std::to_string(each->front()));
    RecordProperty(ranks + "median", std::to_string((*each)[each->size() / 2]));
    RecordProperty(ranks + "most", std::to_string(each->back()));
  }
}

}  // namespace tilestone::save_by_files_scale_test
