// Counts the memory that this process allocates. A test that links it replaces malloc.
#pragma once

#include <cstdint>

namespace tilestone {

// The bytes that are allocated now, as rounded by malloc.
uint64_t allocated_bytes();
// The maximum of allocated_bytes() since the last call of reset_peak().
uint64_t peak_bytes();
void reset_peak();

}  // namespace tilestone
