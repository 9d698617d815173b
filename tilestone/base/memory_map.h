// What this process may write, as the kernel's list of its memory says (/proc/self/maps).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tilestone {

// One look at the list, which takes about a millisecond; what is mapped later is not in it.
class MemoryMap {
 public:
  MemoryMap();

  // Whether all of [begin, begin + bytes) may be written; true where the list can't be read.
  bool is_writable(const void* begin, uint64_t bytes) const;

 private:
  std::vector<std::pair<uint64_t, uint64_t>> writable_;  // [first, second), ascending, apart
  bool is_known_ = false;
};

// The same of one range, for memory that is about to be written: a short range is first brought in
// for writing, which takes no look at the list (Linux 5.14 and newer).
bool is_writable_now(const void* begin, uint64_t bytes);

}  // namespace tilestone
