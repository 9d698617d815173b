#pragma once

#include "tilestone/engine/location.h"
#include "tilestone/engine/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Saves the state that the ranks of options.comm hold together; every rank calls. On return the
// checkpoint is complete and durable. On failure every rank throws the same Error, which names
// the rank that failed, before the timeout; what stood at the location still stands, and nothing
// half-done can be taken for a checkpoint.
//
// Protocol (crash argument in commit.cc):
//  1. Each rank: factories, non-persistent dropped, items, local plan. Gathered to the
//     coordinator, which locks the location, refuses or accepts what stands there, plans, and
//     scatters each rank its own assignment with the save id.
//  2. Each rank writes new data files, makes them and their directory entries durable, and reports.
//  3. The coordinator merges the reports (coverage is checked here), publishes the manifest, then
//     the format's metadata by one rename: the checkpoint exists. Everybody is told.
//  4. The coordinator removes the files of the checkpoint that was replaced, and those of earlier
//     failed attempts.
SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options = {});

}  // namespace tilestone
