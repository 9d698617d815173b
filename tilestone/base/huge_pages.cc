#include "tilestone/base/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

namespace tilestone {

void prefer_huge_pages(void* memory, uint64_t bytes) {
  static const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(memory));
  const uint64_t before = (page - address % page) % page;
  if (bytes < before + kHugePage) return;
  // The advice may fail; small pages work too.
  ::madvise(static_cast<std::byte*>(memory) + before, (bytes - before) / page * page,
            MADV_HUGEPAGE);
}

}  // namespace tilestone
