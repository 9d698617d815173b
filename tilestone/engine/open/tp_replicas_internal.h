// Second names of replicas: a Megatron-Core in which each tensor-parallel rank writes its own copy
// of a replicated tensor, to read it from its own file again, calls them
// "KEY.__tp_replica_RANK". Here they are one tensor, KEY, under any tensor-parallel size.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// "KEY" of "KEY.__tp_replica_3"; "" for any other key.
std::string_view key_of_replica(std::string_view key);

// Tensors under such names become one of the plain name: the plain one where there is one, else
// that of the lowest rank. The others are copies of it. Names stay where what they name is not the
// same: another dtype, shape or chunks, or other checksums where those are known.
void unite_tp_replicas(Metadata& metadata);

// Gives the sharded tensors of a template the plain name where the checkpoint, so united, has no
// tensor of theirs; of rank 0 the replica id stays, the others are replicas. `renamed` gets the
// names that they had.
void ask_for_plain_keys(StateDict& wanted, const Metadata& stored, std::set<std::string>& renamed);

}  // namespace tilestone::engine
