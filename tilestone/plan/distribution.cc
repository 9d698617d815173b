// The least-loaded rank of a set comes from a heap of (load, rank) entries. The loads in a heap may
// be out of date, because other sets with the same ranks add to them. Loads only grow, so the load
// in a heap entry is at most the rank's real load. So if the top entry is up to date, it is the
// least-loaded rank, and the lowest one of several. If it is not, it is corrected and moves down
// the heap.
#include "tilestone/plan/distribution.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
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

}  // namespace tilestone
