// Random tensors, and random distributions of them over ranks.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tilestone/state/sharded.h"

namespace tilestone::tests {

using Random = std::mt19937_64;

// A whole tensor, in memory.
struct Reference {
  std::string key;
  TensorView all;
};

// Any dtype, 0 to 4 dims, some of them 0, random bytes.
Reference random_tensor(const std::string& key, Random& random);

enum class LayoutKind { kGrid, kIrregular, kFlat, kPlacements, kPrepended, kReplicated };
LayoutKind random_kind(Random& random);

// The memory of a shard: memory with the reference's elements (sometimes strided), memory to be
// filled by a load, or none.
enum class Fill { kData, kMemory, kNone };

// The shards that `rank` of `world` holds. All ranks must pass the same other arguments, the random
// state included. Then the ranks together hold the whole tensor, once or in declared replicas.
std::vector<ShardedTensor> random_layout(const Reference& reference, LayoutKind kind, Random random,
                                         int rank, int world, Fill fill);

// The elements in C order.
Bytes bytes_of(const TensorView& tensor);

}  // namespace tilestone::tests
