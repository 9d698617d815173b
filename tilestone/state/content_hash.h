// Hashes a value's content, to find out whether ranks hold the same.
#pragma once

#include <cstdint>

#include "tilestone/state/value.h"

namespace tilestone {

// Equal values have equal hashes. So do sets and dicts whose entries are in a different order,
// because Python orders a set of strings differently in each process. Never 0. Another version of
// Tilestone may give another hash. The hash is only compared between ranks, and only stored to
// compare the copies within one save.
uint64_t content_hash(const Value& value);

}  // namespace tilestone
