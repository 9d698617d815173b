// Megatron-Core's distribution of replicated shards: which of the ranks that hold a shard writes
// it, or reads it for the others. Every rank that is given the same shards finds the same, and it
// is what stock Megatron-Core finds, so that files and loads are balanced alike.
//
// Tilestone's own saves don't need it (save_plan.h); it serves those who ask for Megatron's.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace tilestone {

struct DistributedShard {
  uint64_t bytes = 0;
  uint32_t holders = 0;  // index into the sets of holders
  // The main replica is outside the group, whose ranks may share the reading but not the writing.
  bool main_is_outside = false;
};

// Shards are taken by (main_is_outside, number of holders, -bytes, place in `shards`), and each
// goes to the least-loaded rank that holds it, to the lowest one of several. `shards` stand in the
// order of their ids; `holder_sets` are ranks of a group of `ranks`, in any order; a rank that
// occurs twice in a set counts twice among the holders.
//
// Result: a rank for each shard. A set that several shards share is looked at once, and then costs
// each of them the logarithm of its size: 1,000 shards on 2,048 ranks take a millisecond, where
// each has its own set 10.
//
// Error(kInvalidArgument) with the place of the shard or set that has no holders, names a set that
// is not there, or a rank outside the group; or when the bytes exceed 64 bits.
std::vector<int> distribute_shards(std::span<const DistributedShard> shards,
                                   std::span<const std::vector<int>> holder_sets, int ranks);

inline constexpr uint32_t kNoFile = std::numeric_limits<uint32_t>::max();

// The same for reading from data files, so that ranks open few files besides their own. A file's
// shards go to the rank that wrote it where it holds them, however many they are. Those of a file
// without such a rank go to the least-loaded holder, together, as long as it does not exceed 1.25
// times the mean of all ranks; the rest of them to the next one. Ties as above.
//
// file_of: for each shard the file that has most of it, an index into `writers`, or kNoFile.
// writers: for each file the rank of the group that wrote it, or -1.
// Errors as above, and of a file that is not there or a writer outside the group.
std::vector<int> distribute_shards_by_file(std::span<const DistributedShard> shards,
                                           std::span<const std::vector<int>> holder_sets, int ranks,
                                           std::span<const uint32_t> file_of,
                                           std::span<const int> writers);

}  // namespace tilestone
