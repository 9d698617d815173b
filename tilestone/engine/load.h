#pragma once

#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Loads what `wanted` asks for into the ranks of options.comm, whatever the sharding of the
// checkpoint. Every rank calls. Tensors that have data are filled in place, others are allocated;
// values and objects come from the checkpoint. Returns a state dict with the structure of `wanted`.
// If any rank fails, every rank throws the same Error, which names that rank; tensors may then be
// partly filled. If another save replaces the checkpoint during the load, the result is the old
// state, the new state, or Error(kNotFound) with a hint that says so. A checkpoint that has only
// lost a data file is kCorrupt.
StateDict load(const StateDict& wanted, const Location& location, const LoadOptions& options = {});

// Loads everything that the checkpoint holds, without a template: each rank gets all of it in new
// memory. Items with a recorded path are nested as they were saved (dicts by text, lists by index);
// the others are at the top level under their keys. Each rank may call this or load(), as it needs.
StateDict load_all(const Location& location, const LoadOptions& options = {});

}  // namespace tilestone
