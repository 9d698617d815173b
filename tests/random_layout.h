// Random tensors, and random ways in which ranks hold them.
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

// What the memory of a shard is: the reference's elements (in strided memory, sometimes), memory
// to be filled, or none.
enum class Fill { kData, kMemory, kNone };

// What `rank` of `world` holds. With equal arguments and random states but for the rank, the ranks
// together hold the whole tensor, once or in declared replicas.
std::vector<ShardedTensor> random_layout(const Reference& reference, LayoutKind kind, Random random,
                                         int rank, int world, Fill fill);

// The elements in C order.
Bytes bytes_of(const TensorView& tensor);

}  // namespace tilestone::tests
