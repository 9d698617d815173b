// What a value holds, as one number: to find out whether ranks hold the same.
#pragma once

#include <cstdint>

#include "tilestone/state/value.h"

namespace tilestone {

// Equal for equal values, and for sets and dicts whose entries stand in another order (Python
// orders a set of strings otherwise in each process). Never 0. Another version may give another
// number: it is compared between ranks, and stored only to tell the copies of one save apart.
uint64_t content_hash(const Value& value);

}  // namespace tilestone
