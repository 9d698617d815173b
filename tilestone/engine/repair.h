// Rewrites damaged files of a checkpoint from their intact parts and from copies.
#pragma once

#include <vector>

#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/run/location.h"

namespace tilestone {

struct RepairReport {
  // As the first verification reported them. What another repair has mended meanwhile is left out.
  std::vector<Damage> mended;
  VerifyReport now;  // what verify finds after the repair
};

// Verifies the checkpoint, and repairs:
//  - each damaged chunk, object, or copy of one that is intact in another file;
//  - bytes between items, which must be zero, and extra bytes at the end of a file;
//  - a file that is missing or too short, if everything that it should hold is intact, in the file
//    itself or elsewhere. Otherwise the file stays as it is, and its damage in `now` lists what is
//    intact nowhere.
//
// Each file is replaced as a whole, in one rename, by a file that has the checksums recorded by its
// save. At any moment, also after a crash, the file is either the old one or the repaired one.
// Damage without an intact copy remains, and `now` reports it. A checkpoint without a manifest is
// only verified. Without damage, nothing is written, not even a lock file.
//
// `progress` reports the verifications ("verify") and between them the writing of new files
// ("repair"). An interrupt stops verification and repair; files that were replaced before it stay
// replaced. Throws what Checkpoint::open and verify throw; kAlreadyExists if there is damage and a
// save or another repair is in progress; kUnsupported if the storage has no locks; kIo also if
// bytes for a new file differ when they are read a second time.
RepairReport repair(const Location& location, const OpenOptions& options = {},
                    const ProgressFn& progress = {});

}  // namespace tilestone
