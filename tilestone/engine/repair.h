// Damaged chunks of a checkpoint written anew from their copies.
#pragma once

#include <vector>

#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/run/location.h"

namespace tilestone {

struct RepairReport {
  std::vector<Damage> mended;  // as verify found them before
  VerifyReport now;            // what verify finds afterwards
};

// Verifies the checkpoint, and writes each chunk, or copy of one, that is damaged and has its
// elements intact in another file anew. A file is replaced as a whole, in one step, by one that is
// the same but for the mended items, which then have the checksums that their save recorded: at any
// moment, and after a crash at any moment, it is what it was or mended. What has no intact copy
// stays as it is, and `now` says so; files that are missing, too short or damaged between their
// items are not mended.
// `progress`: of the two verifications. Errors: those of Checkpoint::open and verify;
// kAlreadyExists where a save is under way; kUnsupported where the storage has no locks; kIo.
RepairReport repair(const Location& location, const OpenOptions& options = {},
                    const ProgressFn& progress = {});

}  // namespace tilestone
