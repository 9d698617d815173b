#pragma once

#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Saves the state that the ranks of options.comm hold together. Every rank calls. On return the
// checkpoint is complete and durable. If any rank fails, every rank throws the same Error, which
// names that rank, before the timeout. A checkpoint that was at the location before is then still
// there, and no incomplete file can be taken for a checkpoint.
//
// Protocol (crash argument in transaction.cc):
//  1. Each rank builds factories, drops non-persistent values, and makes its items and its local
//     plan. The coordinator gathers the plans, checks that location and options are equal on all
//     ranks, plans, locks the location, and refuses or accepts the checkpoint that is there. It
//     sends each rank its assignment and the save id.
//  2. Each rank writes new data files, makes them and their directory entries durable, and reports.
//  3. The coordinator opens every reported file, and merges the reports, which checks coverage. It
//     publishes the manifest and then the format's metadata, the latter by one rename: now the
//     checkpoint exists. Every rank gets the result.
//  4. The coordinator removes the files of the replaced checkpoint and those of earlier failed
//     saves.
//
// If the file names of a format do not contain the save id, all of this happens in a directory
// beside the location, and the index is published there. The rename in step 3 is then the rename of
// that directory to the location, or its exchange with the directory at the location.
//
// By files (options.by_files) there is no communicator; the protocol, and what happens in each
// race, is described in commit/attempt.cc. Throws this rank's own errors, or what another rank has
// failed with; the save has then failed for all its ranks. kTimeout names the ranks that have not
// written by the deadline; the written files stay, so that those ranks can complete the save.
SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options = {});

}  // namespace tilestone
