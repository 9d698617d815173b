#pragma once

#include "tilestone/engine/location.h"
#include "tilestone/engine/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Loads what `wanted` asks for into the ranks of options.comm, however the checkpoint was sharded;
// every rank calls. Tensors that have data are filled in place, others are allocated; values and
// objects come from the checkpoint. Returns a state dict of wanted's structure. On failure every
// rank throws the same Error, naming the rank that failed; tensors may then be partly filled.
// When another save replaces the checkpoint meanwhile: the old state, the new one, or
// Error(kNotFound) with a hint that says so.
StateDict load(const StateDict& wanted, const Location& location, const LoadOptions& options = {});

}  // namespace tilestone
