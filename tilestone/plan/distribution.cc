// The least-loaded rank of a set comes from a heap of (load, rank) entries. The loads in a heap may
// be out of date, because other sets with the same ranks add to them. Loads only grow, so the load
// in a heap entry is at most the rank's real load. So if the top entry is up to date, it is the
// least-loaded rank, and the lowest one of several. If it is not, it is corrected and moves down
// the heap.
#include "tilestone/plan/distribution.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"

namespace tilestone {
namespace {

constexpr size_t kScanned = 16;  // up to this many holders, a scan is faster than a heap

class DistributionGroup {
 public:
  DistributionGroup(std::span<const std::vector<int>> holder_sets, int ranks)
      : sets_(holder_sets), loads_(static_cast<size_t>(ranks)), heaps_(holder_sets.size()) {}

  // The least-loaded rank of a set. `once`: only one shard has this set.
  int least(uint32_t set, bool once) {
    const bool scan = once || sets_[set].size() <= kScanned;
    return scan ? least_by_scan(sets_[set]) : least_by_heap(set);
  }
  void give(int rank, uint64_t bytes) {
    uint64_t& load = loads_[static_cast<size_t>(rank)];
    load = checked_add(load, bytes, "bytes of a rank's shards");
  }
  uint64_t load_of(int rank) const { return loads_[static_cast<size_t>(rank)]; }

 private:
  using Entry = std::pair<uint64_t, int>;  // (load, rank)

  int least_by_scan(const std::vector<int>& holders) const {
    Entry least{load_of(holders.front()), holders.front()};
    for (int rank : holders) least = std::min(least, Entry{load_of(rank), rank});
    return least.second;
  }

  int least_by_heap(uint32_t set) {
    std::vector<Entry>& heap = heaps_[set];
    if (heap.empty()) {
      for (int rank : sets_[set]) heap.emplace_back(load_of(rank), rank);
      std::make_heap(heap.begin(), heap.end(), std::greater<>());
    }
    while (heap.front().first != load_of(heap.front().second)) {
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      heap.back().first = load_of(heap.back().second);
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
    return heap.front().second;
  }

  std::span<const std::vector<int>> sets_;
  std::vector<uint64_t> loads_;
  std::vector<std::vector<Entry>> heaps_;
};

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "distribution of shards: " + what);
}

void check_sets(std::span<const std::vector<int>> holder_sets, int ranks) {
  if (ranks < 0) refuse("the number of ranks is negative: " + std::to_string(ranks));
  for (size_t set = 0; set < holder_sets.size(); ++set) {
    for (int rank : holder_sets[set]) {
      if (rank >= 0 && rank < ranks) continue;
      refuse("holder set " + std::to_string(set) + " names rank " + std::to_string(rank) +
             ", but the group has " + std::to_string(ranks) + " ranks");
    }
  }
}

// The number of shards that use each set.
std::vector<size_t> uses_of(std::span<const DistributedShard> shards,
                            std::span<const std::vector<int>> holder_sets) {
  std::vector<size_t> uses(holder_sets.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    const uint32_t set = shards[i].holders;
    if (set >= uses.size()) {
      refuse("shard " + std::to_string(i) + " names holder set " + std::to_string(set) +
             ", but only " + std::to_string(uses.size()) + " sets are given");
    }
    if (holder_sets[set].empty()) refuse("shard " + std::to_string(i) + " is held by no rank");
    ++uses[set];
  }
  return uses;
}

// The shards of one file that have the same set of holders.
struct FileGroup {
  uint64_t bytes = 0;
  std::vector<size_t> shards;
};
// The unique key (main_is_outside, number of holders, file, set).
using FileGroupKey = std::tuple<bool, size_t, uint32_t, uint32_t>;

class ByFile {
 public:
  ByFile(std::span<const DistributedShard> shards, std::span<const std::vector<int>> holder_sets,
         int ranks, std::span<const uint32_t> file_of, std::span<const int> writers)
      : shards_(shards),
        sets_(holder_sets),
        uses_(uses_of(shards, holder_sets)),
        file_of_(file_of),
        writers_(writers),
        group_(holder_sets, ranks),
        given_(shards.size(), -1),
        readers_(writers.size(), -1) {
    uint64_t total = 0;
    for (const auto& shard : shards) total = checked_add(total, shard.bytes, "bytes of the shards");
    const uint64_t mean = ranks == 0 ? 0 : total / static_cast<uint64_t>(ranks);
    limit_ = mean + mean / 4;
  }

  std::vector<int> run() {
    give_to_writers();
    for (const FileGroup& group : rest_in_order()) {
      for (size_t i : group.shards) give_to_reader(i);
    }
    return std::move(given_);
  }

 private:
  void give(size_t i, int rank) {
    given_[i] = rank;
    group_.give(rank, shards_[i].bytes);
  }

  void give_to_writers() {
    std::vector<std::vector<int>> sorted(sets_.begin(), sets_.end());
    for (auto& set : sorted) std::sort(set.begin(), set.end());
    for (size_t i = 0; i < shards_.size(); ++i) {
      if (file_of_[i] == kNoFile) continue;
      const int writer = writers_[file_of_[i]];
      const std::vector<int>& holders = sorted[shards_[i].holders];
      if (std::binary_search(holders.begin(), holders.end(), writer)) give(i, writer);
    }
  }

  // The shards that went to no writer: groups with few holders first, then large groups, and in
  // each group large shards first.
  std::vector<FileGroup> rest_in_order() const {
    std::map<FileGroupKey, FileGroup> by_key;
    for (size_t i = 0; i < shards_.size(); ++i) {
      if (given_[i] >= 0) continue;
      const DistributedShard& shard = shards_[i];
      FileGroup& group =
          by_key[{shard.main_is_outside, sets_[shard.holders].size(), file_of_[i], shard.holders}];
      group.bytes += shard.bytes;
      group.shards.push_back(i);
    }
    std::vector<std::pair<FileGroupKey, FileGroup>> groups(by_key.begin(), by_key.end());
    std::stable_sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
      const auto key = [](const auto& g) {
        return std::tuple(std::get<0>(g.first), std::get<1>(g.first), ~g.second.bytes);
      };
      return key(a) < key(b);
    });
    std::vector<FileGroup> rest;
    for (auto& [key, group] : groups) {
      std::stable_sort(group.shards.begin(), group.shards.end(),
                       [&](size_t a, size_t b) { return shards_[a].bytes > shards_[b].bytes; });
      rest.push_back(std::move(group));
    }
    return rest;
  }

  // Gives shard i to the rank that got the previous shard of its file, unless that would exceed the
  // rank's limit.
  void give_to_reader(size_t i) {
    const DistributedShard& shard = shards_[i];
    const std::vector<int>& holders = sets_[shard.holders];
    int* reader = file_of_[i] == kNoFile ? nullptr : &readers_[file_of_[i]];
    const bool goes_on = reader != nullptr && *reader >= 0 &&
                         group_.load_of(*reader) + shard.bytes <= limit_ &&
                         std::find(holders.begin(), holders.end(), *reader) != holders.end();
    const int rank = goes_on ? *reader : group_.least(shard.holders, uses_[shard.holders] == 1);
    if (reader != nullptr) *reader = rank;
    give(i, rank);
  }

  std::span<const DistributedShard> shards_;
  std::span<const std::vector<int>> sets_;
  std::vector<size_t> uses_;
  std::span<const uint32_t> file_of_;
  std::span<const int> writers_;
  DistributionGroup group_;
  std::vector<int> given_;    // -1: not given yet
  std::vector<int> readers_;  // for each file, the rank that got its last shard, or -1
  uint64_t limit_ = 0;
};

}  // namespace

std::vector<int> distribute_shards(std::span<const DistributedShard> shards,
                                   std::span<const std::vector<int>> holder_sets, int ranks) {
  check_sets(holder_sets, ranks);
  const std::vector<size_t> uses = uses_of(shards, holder_sets);
  std::vector<size_t> order(shards.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const DistributedShard& x = shards[a];
    const DistributedShard& y = shards[b];
    if (x.main_is_outside != y.main_is_outside) return y.main_is_outside;
    const size_t holders_x = holder_sets[x.holders].size();
    const size_t holders_y = holder_sets[y.holders].size();
    return holders_x != holders_y ? holders_x < holders_y : x.bytes > y.bytes;
  });
  DistributionGroup group(holder_sets, ranks);
  std::vector<int> given(shards.size());
  for (size_t i : order) {
    const DistributedShard& shard = shards[i];
    given[i] = group.least(shard.holders, uses[shard.holders] == 1);
    group.give(given[i], shard.bytes);
  }
  return given;
}

std::vector<int> distribute_shards_by_file(std::span<const DistributedShard> shards,
                                           std::span<const std::vector<int>> holder_sets, int ranks,
                                           std::span<const uint32_t> file_of,
                                           std::span<const int> writers) {
  check_sets(holder_sets, ranks);
  if (file_of.size() != shards.size()) {
    refuse("file_of has " + std::to_string(file_of.size()) +
           " entries, but the number of shards is " + std::to_string(shards.size()));
  }
  for (uint32_t file : file_of) {
    if (file == kNoFile || file < writers.size()) continue;
    refuse("file_of names file " + std::to_string(file) + ", but writers has " +
           std::to_string(writers.size()) + " entries");
  }
  for (int writer : writers) {
    if (writer >= -1 && writer < ranks) continue;
    refuse("the writer of a file is rank " + std::to_string(writer) + ", but the group has " +
           std::to_string(ranks) + " ranks");
  }
  return ByFile(shards, holder_sets, ranks, file_of, writers).run();
}

}  // namespace tilestone
