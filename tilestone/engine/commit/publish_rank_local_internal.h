// Turns a rank-local checkpoint into an ordinary one: one of ours, or of stock torch
// (use_collectives=False).
#pragma once

#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

// Whether the location has a rank-local checkpoint. False if there is no checkpoint. Throws the
// errors of opening it.
bool is_rank_local_at(const Location& location);

// Returns the new save id. Reads every item once, unless the ranks' receipts are there.
// `differing`: what to do about an object that differs between ranks. Throws the
// same errors as publish() in unpublished.h.
std::string publish_rank_local(const Location& location, int threads, Deadline deadline,
                               Checks::Differing differing = Checks::Differing::kWarn);

}  // namespace tilestone::engine
