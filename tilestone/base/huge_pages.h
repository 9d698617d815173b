// Asks the kernel to use huge pages for large memory. This makes page faults 512 times rarer. It
// also makes direct I/O faster: a disk takes a limited number of memory segments in one request,
// and a huge page is one segment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilestone {

inline constexpr uint64_t kHugePage = uint64_t{2} << 20;  // bytes

// Call before the memory is touched. It concerns the whole pages in [memory, memory + bytes). Does
// nothing if fewer than kHugePage bytes are left, or if the system has no huge pages.
void prefer_huge_pages(void* memory, uint64_t bytes);

}  // namespace tilestone
