// Allocates memory for the tensors that a load fills.
#pragma once

#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// The tree with fresh memory for every tensor that has none, except those in `kept`. The pieces of
// a sharded tensor become views of its new local tensor.
StateDict with_memory(StateDict wanted, const KeptLeaves& kept = {});

}  // namespace tilestone::engine
