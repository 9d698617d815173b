// Counts what this process allocates: linked into a test, it stands in front of malloc.
#pragma once

#include <cstdint>

namespace tilestone {

// Bytes that are allocated now, as malloc rounds them.
uint64_t allocated_bytes();
// The most that were allocated at once since the last call of reset_peak().
uint64_t peak_bytes();
void reset_peak();

}  // namespace tilestone
