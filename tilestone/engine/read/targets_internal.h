// Memory for what a load is to fill.
#pragma once

#include "tilestone/engine/run/kept_leaves.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// The tree with fresh memory for every tensor that has none, but for those that are `kept`; a
// sharded tensor's pieces become views of its new local tensor.
StateDict with_memory(StateDict wanted, const KeptLeaves& kept = {});

}  // namespace tilestone::engine
