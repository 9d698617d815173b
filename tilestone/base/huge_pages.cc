#include "tilestone/base/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

namespace tilestone {

void prefer_huge_pages(void* memory, uint64_t bytes) {
  static const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (bytes < kHugePage) return;
  const uint64_t before = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(memory)) % page;
  const uint64_t whole = (before + bytes + page - 1) / page * page;
  // The advice may fail; small pages work too.
  ::madvise(static_cast<std::byte*>(memory) - before, whole, MADV_HUGEPAGE);
}

}  // namespace tilestone
