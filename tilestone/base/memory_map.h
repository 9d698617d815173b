// Finds out which memory this process may write, from the kernel's list (/proc/self/maps).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tilestone {

// A snapshot of the list, which takes about a millisecond. Later mappings are not in it.
class MemoryMap {
 public:
  MemoryMap();

  // Whether all of [begin, begin + bytes) is writable. True if the list can't be read.
  bool is_writable(const void* begin, uint64_t bytes) const;

 private:
  std::vector<std::pair<uint64_t, uint64_t>> writable_;  // [first, second), ascending, disjoint
  bool is_known_ = false;
};

// Checks one range that is about to be written. For a range of at most 1 MiB it first asks the
// kernel to fault the pages in for writing (Linux 5.14 and newer). If that works, it does not need
// the list.
bool is_writable_now(const void* begin, uint64_t bytes);

}  // namespace tilestone
