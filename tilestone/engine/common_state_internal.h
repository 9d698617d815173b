// Whether all ranks of a save have the same common state, of which one is saved.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/orders_internal.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

// The ranks whose hash is another than rank 0's, ascending.
std::vector<int> differing_ranks(const std::vector<PlanMessage>& messages);

// A rank's common state by paths and hashes.
Bytes encode_parts(const Value& common);

// What the states of rank 0 and of the first of `ranks` say, by their encode_parts(): a warning, or
// Error(kMismatch), which names up to ten paths, with what both have there, and `ranks`.
void tell_of_other_state(ByteView parts_of_0, ByteView parts_of_other,
                         const std::vector<int>& ranks, SaveOptions::Differing common_differs);

}  // namespace tilestone::engine
