// A rank of a save without a communicator that comes again: whether it brings the state of which it
// has left a report.
#pragma once

#include "tilestone/plan/report.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// Compares the chunks and objects that the report says were written with those that the rank would
// write now: keys, dtypes, shapes and boxes. What the elements are is not known. Error(kMismatch)
// with the first key that differs, and the rank.
void expect_reported_state(const RankReport& report, const LocalSavePlan& plan,
                           const Assignment& mine);

}  // namespace tilestone::engine
