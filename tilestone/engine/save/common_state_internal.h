// Compares the common states of the ranks of a save, of which only rank 0's is saved.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/save/messages_internal.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

// The ranks whose hash (PlanMessage::common) differs from rank 0's, ascending.
std::vector<int> differing_ranks(const std::vector<PlanMessage>& messages);

// Encodes a rank's common state as paths and hashes.
Bytes encode_parts(const Value& common);

// Reports how the common state of the first rank in `ranks` differs from rank 0's. Both are given
// as encode_parts() returns them. Logs a warning, or throws Error(kMismatch) if `common_differs` is
// kError. The text names `ranks` and up to ten paths, with the values of both ranks there.
void tell_of_other_state(ByteView parts_of_0, ByteView parts_of_other,
                         const std::vector<int>& ranks, Checks::Differing common_differs);

}  // namespace tilestone::engine
