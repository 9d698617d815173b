// Megatron-Core's distribution of replicated shards: decides which of the ranks that hold a shard
// writes it, or reads it for the others. Every rank that is given the same shards computes the same
// result. The result equals that of stock Megatron-Core, so files and loads are balanced alike.
//
// Tilestone's own saves do not use it (see save_plan.h). It is for callers that want Megatron's
// distribution.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tilestone {

struct DistributedShard {
  uint64_t bytes = 0;
  uint32_t holders = 0;  // index into holder_sets
  // The main replica is outside the group, so the group's ranks may read the shard for each other
  // but must not write it.
  bool main_is_outside = false;
};

// Shards are processed in the order of (main_is_outside, number of holders, -bytes, index in
// `shards`). Each shard goes to the least-loaded rank that holds it; ties go to the lowest rank.
// `shards` must be ordered by their ids. Each set in `holder_sets` lists ranks of a group of
// `ranks` ranks, in any order. A rank that occurs twice in a set counts twice in the number of
// holders.
//
// Returns one rank per shard. A set that several shards share is scanned once and then costs each
// of them the logarithm of its size. 1,000 shards on 2,048 ranks take a millisecond, or 10 if each
// shard has its own set.
//
// Throws Error(kInvalidArgument), with the index of the shard or set, if a shard has no holders or
// refers to a set that does not exist, or if a set contains a rank outside the group. Throws the
// same code if the bytes exceed 64 bits.
std::vector<int> distribute_shards(std::span<const DistributedShard> shards,
                                   std::span<const std::vector<int>> holder_sets, int ranks);

}  // namespace tilestone
