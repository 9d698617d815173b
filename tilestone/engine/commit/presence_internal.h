// Whether the files that all ranks have written are in the coordinator's directory.
#pragma once

#include <span>

#include "tilestone/base/deadline.h"
#include "tilestone/plan/report.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Opens every file of the reports by its name and checks its size. A shared file system may show
// the files of other hosts late, so what is missing is looked for again until half of the time to
// the deadline is over, at most 30 seconds.
//
// Error(kMismatch) with file and rank for a file that stays missing or has another size: the rank's
// path then leads to another directory. Errors of the storage otherwise; kTimeout past the
// deadline. `threads`: the save's option.
void expect_files(Storage& storage, std::span<const RankReport> reports, int threads,
                  Deadline deadline);

}  // namespace tilestone::engine
