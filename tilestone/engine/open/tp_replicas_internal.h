// Second names of replicas. In one variant of Megatron-Core each tensor-parallel rank writes its
// own copy of a replicated tensor under the key "KEY.__tp_replica_RANK", to read it from its own
// file again. Tilestone treats these copies as one tensor, KEY, under any tensor-parallel size.
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

inline constexpr uint32_t kMaxReplicas = 1u << 16;  // limit for tensor-parallel ranks

// "KEY" for "KEY.__tp_replica_3"; "" for any other key.
std::string_view key_of_replica(std::string_view key);

// Plain key of a tensor -> the highest tensor-parallel rank for which an index has a second name of
// the same bytes.
using ReplicaNames = std::map<std::string, uint32_t>;

// The tensors of which this rank holds a replica of a tensor-parallel rank other than 0, according
// to their replica ids. Error(kInvalidArgument) for an impossible rank.
ReplicaNames replicas_among(const Items& items);
// Merges `others` into `names`. Keeps the higher rank of each key.
void merge_replica_names(ReplicaNames& names, const ReplicaNames& others);

// Prepares metadata for writing an index: adds second names of the tensors, for rank 0 up to the
// given rank. Ignores keys that are not tensors. Removes copies, because no index names them.
// Error(kInvalidArgument) if another tensor or an object has such a name.
void add_replica_names(Metadata& metadata, const ReplicaNames& names);
// Removes tensors with second names from the metadata of an index, if the tensor with the plain
// name has the same bytes. Returns the removed names. Must be called before copies are attached.
ReplicaNames take_replica_names(Metadata& metadata);

// (plain key, rank) -> box -> where this rank's own replica of the chunk is stored.
using ReplicaPlaces = std::map<std::pair<std::string, uint32_t>, std::map<Box, ItemLocation>>;

// Unites tensors with second names under the plain name. The tensor with the plain name is kept or,
// if there is none, that of the lowest rank; the others become copies of it. Tensors that differ in
// dtype, shape, chunks or known checksums keep their names.
ReplicaPlaces unite_tp_replicas(Metadata& metadata);

// Renames the sharded tensors of a template that have second names and are not in the checkpoint,
// to the plain name or, if the checkpoint has no such tensor, to the lowest rank's name. `stored`:
// the metadata after unite_tp_replicas(). Rank 0's tensor keeps its replica id; the others become
// replicas. Returns the old names.
std::set<std::string> ask_for_plain_keys(StateDict& wanted, const Metadata& stored);
// The rank in "KEY.__tp_replica_3", here 3; 0 for any other key.
uint32_t rank_of_replica(std::string_view key);

}  // namespace tilestone::engine
