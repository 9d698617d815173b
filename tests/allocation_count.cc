#include "tests/allocation_count.h"

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

// glibc's own names of malloc, calloc, realloc, memalign and free.
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
void __libc_free(void* memory);
}

namespace tilestone {
namespace {

std::atomic<uint64_t> allocated{0};
std::atomic<uint64_t> peak{0};

void* taken(void* memory) {
  if (memory == nullptr) return nullptr;
  const uint64_t now = allocated += malloc_usable_size(memory);
  for (uint64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) continue;
  return memory;
}

void gone(void* memory) {
  if (memory != nullptr) allocated -= malloc_usable_size(memory);
}

}  // namespace

uint64_t allocated_bytes() { return allocated; }
uint64_t peak_bytes() { return peak; }
void reset_peak() { peak = allocated.load(); }

}  // namespace tilestone

extern "C" {

void* malloc(size_t size) { return tilestone::taken(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return tilestone::taken(__libc_calloc(count, size)); }
void* realloc(void* memory, size_t size) {
  tilestone::gone(memory);
  void* const moved = __libc_realloc(memory, size);
  if (moved == nullptr && size > 0) tilestone::taken(memory);
  return tilestone::taken(moved);
}
void* memalign(size_t alignment, size_t size) {
  return tilestone::taken(__libc_memalign(alignment, size));
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** memory, size_t alignment, size_t size) {
  *memory = memalign(alignment, size);
  return *memory != nullptr || size == 0 ? 0 : ENOMEM;
}
void free(void* memory) {
  tilestone::gone(memory);
  __libc_free(memory);
}
}
