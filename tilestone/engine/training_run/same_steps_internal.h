// Decisions about a run that rank 0 makes for all ranks.
#pragma once

#include <functional>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::engine {

// Every rank gets what `decide` returns on rank 0, or its error.
Bytes decided_by_rank_0(const Communicator& comm, const char* work, Deadline deadline,
                        const std::function<Bytes()>& decide);

// The same, once all ranks see the same steps in the directory; Error(kMismatch) if they do not
// within 1.5 s. `terms` must be equal on all ranks. `listed`: receives what the rank has seen
// there.
Bytes decided_on_same_steps(const RunDirectory& directory, const Communicator& comm,
                            const char* work, Deadline deadline, const Terms& terms,
                            const std::function<Bytes()>& decide, Listing* listed = nullptr);

}  // namespace tilestone::engine
