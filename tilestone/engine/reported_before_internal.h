// For a save by files: checks that a restarted rank saves the same state as the report that it left
// before.
#pragma once

#include "tilestone/plan/report.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// Compares the chunks and objects that the report lists with those that the rank would write now:
// keys, dtypes, shapes and boxes, but not the elements. Throws Error(kMismatch) that names the rank
// and the first key that differs.
void expect_reported_state(const RankReport& report, const LocalSavePlan& plan,
                           const Assignment& mine);

}  // namespace tilestone::engine
