// Finds what only some of its declared holders have. Ranks that plan by rule don't tell one another
// what they hold, so the rank that should write a shard may not have it, and no other rank would.
#pragma once

#include <span>
#include <vector>

#include "tilestone/plan/receipt.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone {

// What a rank of a world of this size has of each set of declared holders, and of the objects that
// every rank has and rank 0 writes. Shards without elements are left out.
std::vector<Receipt::Held> held_by_rule(const LocalSavePlan& plan, int world_size);

// Throws Error(kMismatch), naming the first rank that differs from the lowest one, if the holders
// of a set don't have the same. receipts: by rank.
void expect_holders_have_the_same(std::span<const Receipt> receipts);

}  // namespace tilestone
