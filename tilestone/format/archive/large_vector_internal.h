// A vector for arenas of many megabytes. It uses huge pages if the system has them; without them,
// page faults take most of the time of filling it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#include "tilestone/base/huge_pages.h"

namespace tilestone::archive {

template <typename T>
struct LargeAllocator {
  using value_type = T;
  LargeAllocator() = default;
  template <typename U>
  LargeAllocator(const LargeAllocator<U>&) {}  // NOLINT: allocators convert

  T* allocate(size_t count) {
    if (count > (size_t{1} << 46) / sizeof(T)) throw std::bad_array_new_length();
    const size_t bytes = count * sizeof(T);
    if (bytes < 2 * kHugePage) return static_cast<T*>(::operator new(bytes));
    const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* memory = std::aligned_alloc(kHugePage, whole);
    if (memory == nullptr) throw std::bad_alloc();
    prefer_huge_pages(memory, whole);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) {
    if (count * sizeof(T) < 2 * kHugePage) return ::operator delete(memory);
    std::free(memory);
  }
  friend bool operator==(const LargeAllocator&, const LargeAllocator&) { return true; }
};

template <typename T>
using LargeVector = std::vector<T, LargeAllocator<T>>;

}  // namespace tilestone::archive
