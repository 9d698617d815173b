// Damaged files of a checkpoint written anew, from what is intact in them and from copies.
#pragma once

#include <vector>

#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/run/location.h"

namespace tilestone {

struct RepairReport {
  std::vector<Damage> mended;  // as verify found them before
  VerifyReport now;            // what verify finds afterwards
};

// Verifies the checkpoint, and writes anew:
//  - each chunk and object, or copy of one, that is damaged and intact in another file;
//  - bytes between items, which are zeros, and a file's end where bytes stand behind it;
//  - a file that is missing or too short, if all that it should hold is intact, in it or elsewhere.
//    Otherwise it stays as it is, and its damage in `now` says what is intact nowhere.
// A file is replaced as a whole, in one step, by one that has the checksums that its save recorded:
// at any moment, and after a crash at any moment, it is what it was or mended. What has no intact
// copy stays as it is, and `now` says so. A checkpoint without a manifest is only verified, and so
// is one without damage: nothing is written then, no lock's file either.
// `progress`: of the verifications. An interrupt ends them and what is written: files that were
// replaced before it stay so. Errors: those of Checkpoint::open and verify; kAlreadyExists where
// something is damaged and a save or another repair is under way; kUnsupported where the storage
// has no locks; kIo, also where bytes for a new file differ when they are read a second time.
RepairReport repair(const Location& location, const OpenOptions& options = {},
                    const ProgressFn& progress = {});

}  // namespace tilestone
