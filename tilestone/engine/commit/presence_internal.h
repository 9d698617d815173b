// Checks that the files that all ranks have written are in the coordinator's directory.
#pragma once

#include <span>

#include "tilestone/base/deadline.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Opens every reported file by its name and checks its size. A shared file system may show files of
// other hosts late, so the search for missing files is repeated until half of the time to the
// deadline is over, for at most 30 seconds. `threads`: the save's option.
//
// Errors: kMismatch with file and rank for a file that stays missing or has another size: the
// rank's path leads to another directory, or the file was lost since; kTimeout past the deadline;
// otherwise the errors of the storage.
void expect_files(Storage& storage, std::span<const Receipt> receipts, int threads,
                  Deadline deadline);

}  // namespace tilestone::engine
