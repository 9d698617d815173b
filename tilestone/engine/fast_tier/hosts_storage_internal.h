// A step of a fast tier as a storage to read from: the files of this host, and those of the others
// through HostReads.
#pragma once

#include <memory>
#include <vector>

#include "tilestone/engine/fast_tier/host_reads_internal.h"
#include "tilestone/engine/save/kept_step_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// `own`: the step's folder on this host. owners[i]: the rank that has about.files[i]; `keeper`: one
// that has the index. Files that are in `own` with their size are read there.
std::shared_ptr<Storage> hosts_storage(std::shared_ptr<Storage> own, const KeptStep& about,
                                       const std::vector<int>& owners, int keeper,
                                       std::shared_ptr<HostReads> fetching);

}  // namespace tilestone::engine
