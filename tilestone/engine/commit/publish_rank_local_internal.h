// Turning a rank-local checkpoint that no attempt of ours speaks of into an ordinary one: stock
// torch's (use_collectives=False), or ours where its hidden files were not copied along.
#pragma once

#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/location.h"

namespace tilestone::engine {

// Whether a rank-local checkpoint stands there. Errors: those of opening it; none where there is no
// checkpoint.
bool is_rank_local_at(const Location& location);

// Returns the new save id. Reads every item once. Errors as publish() in unpublished.h.
std::string publish_rank_local(const Location& location, int threads, Deadline deadline);

}  // namespace tilestone::engine
