// For a save by files: checks that a restarted rank saves the same state as the receipt that it
// left before.
#pragma once

#include <cstdint>

#include "tilestone/engine/save/share_internal.h"
#include "tilestone/plan/receipt.h"

namespace tilestone::engine {

// Receipt::state of this share, whose contents are noted.
uint64_t state_of(const SaveShare& share);

// Compares what the receipt says with what the rank would write now: keys, dtypes, shapes, boxes,
// and then contents: the elements of all that it wrote, and of the replicas that ranks compare
// (plan/contents.h). Throws Error(kMismatch) that names the rank and, if the rank writes it, the
// first key that differs.
void expect_reported_state(const Receipt& receipt, const SaveShare& share);

// The same for two receipts of one rank, of which `counted` counts, and `own` is what this process
// has written at the same time.
void expect_same_receipt(const Receipt& counted, const Receipt& own);

}  // namespace tilestone::engine
