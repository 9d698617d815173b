#pragma once

#include <optional>

#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// What a load asks for: a template, which must outlive the call, or std::nullopt for everything.
struct Wanted {
  Wanted(const StateDict& like) : state(&like) {}
  Wanted(std::nullopt_t) {}
  const StateDict* state = nullptr;
};

// Loads what `wanted` asks for into the ranks of options.comm, whatever the sharding of the
// checkpoint. Every rank calls. Tensors that have data are filled in place, others are allocated;
// values and objects come from the checkpoint. Returns a state dict with the structure of `wanted`.
// If any rank fails, every rank throws the same Error, which names that rank; tensors may then be
// partly filled. If another save replaces the checkpoint during the load, the result is the old
// state, the new state, or Error(kNotFound) with a hint that says so. A checkpoint that has only
// lost a data file is kCorrupt.
//
// A rank that asks for everything gets all that the checkpoint holds, in new memory. Items with a
// recorded path are nested as they were saved (dicts by text, lists by index); the others are at
// the top level under their keys. Other ranks may have a template.
StateDict load(Wanted wanted, const Location& location, const LoadOptions& options = {});

}  // namespace tilestone
