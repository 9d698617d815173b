// Asks the kernel to use huge pages for large memory. This makes page faults 512 times rarer. It
// also makes direct I/O faster: a disk takes a limited number of memory segments in one request,
// and a huge page is one segment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilestone {

inline constexpr uint64_t kHugePage = uint64_t{2} << 20;  // bytes

// Concerns the pages that contain a byte of [memory, memory + bytes), and of these the ones that
// are first touched later. The first and the last page may contain other memory too; the advice
// does it no harm. Whole pages matter: the kernel keeps one record for each run of pages with the
// same advice, and a process may have only 65,530 of them. Does nothing if bytes < kHugePage, or if
// the system has no huge pages.
void prefer_huge_pages(void* memory, uint64_t bytes);

}  // namespace tilestone
