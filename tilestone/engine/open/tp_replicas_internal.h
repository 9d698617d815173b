// Second names of replicas: a Megatron-Core in which each tensor-parallel rank writes its own copy
// of a replicated tensor, to read it from its own file again, calls them
// "KEY.__tp_replica_RANK". Here they are one tensor, KEY, under any tensor-parallel size.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

inline constexpr uint32_t kMaxReplicas = 1u << 16;  // ranks of tensor parallelism

// "KEY" of "KEY.__tp_replica_3"; "" for any other key.
std::string_view key_of_replica(std::string_view key);

// Tensors by plain key, and the highest rank of which an index has a second name of the same bytes.
using ReplicaNames = std::map<std::string, uint32_t>;

// Of what a rank saves: the tensors of which it holds another replica than the first
// tensor-parallel rank's, by their replica ids. Error(kInvalidArgument) for an impossible rank.
ReplicaNames replicas_among(const Items& items);
// Takes the higher rank of each key.
void merge_replica_names(ReplicaNames& names, const ReplicaNames& others);

// For an index that is to be written: gives the tensors their second names, from rank 0's on. Those
// of keys that are no tensors are left out. Copies are forgotten: no index has them.
// Error(kInvalidArgument) where something else has such a name.
void add_replica_names(Metadata& metadata, const ReplicaNames& names);
// Of an index that was read, before copies are known: takes out tensors of second names of which
// the plain one has the same bytes.
ReplicaNames take_replica_names(Metadata& metadata);

// Where a rank's own replica of a chunk is stored, by plain key, rank and box: file and offset.
using ReplicaPlaces = std::map<std::pair<std::string, uint32_t>, std::map<Box, ItemLocation>>;

// Tensors under such names become one of the plain name: the plain one where there is one, else
// that of the lowest rank. The others are copies of it. Names stay where what they name is not the
// same: another dtype, shape or chunks, or other checksums where those are known.
ReplicaPlaces unite_tp_replicas(Metadata& metadata);

// Gives the sharded tensors of a template the plain name where the checkpoint, so united, has no
// tensor of theirs, or the lowest rank's where there is no plain one; of rank 0 the replica id
// stays, the others are replicas. `renamed` gets the names that they had.
void ask_for_plain_keys(StateDict& wanted, const Metadata& stored, std::set<std::string>& renamed);
// The rank of "KEY.__tp_replica_3".
uint32_t rank_of_replica(std::string_view key);

}  // namespace tilestone::engine
