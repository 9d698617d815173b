#include "tilestone/base/memory_map.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

namespace tilestone {
namespace {

constexpr uint64_t kShort = 1u << 20;   // bytes
constexpr int kMadvPopulateWrite = 23;  // MADV_POPULATE_WRITE; older headers do not define it

uint64_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

MemoryMap::MemoryMap() {
  std::ifstream list("/proc/self/maps");
  std::string line;  // "55d0c0a00000-55d0c0a21000 rw-p 00000000 00:00 0  [heap]"
  while (std::getline(list, line)) {
    unsigned long long begin = 0, end = 0;
    char access[5] = "";
    if (std::sscanf(line.c_str(), "%llx-%llx %4s", &begin, &end, access) != 3) continue;
    is_known_ = true;
    if (access[1] != 'w') continue;
    if (!writable_.empty() && writable_.back().second == begin) {
      writable_.back().second = end;
    } else {
      writable_.emplace_back(begin, end);
    }
  }
}

bool MemoryMap::is_writable(const void* begin, uint64_t bytes) const {
  if (!is_known_ || bytes == 0) return true;
  const uint64_t first = address(begin);
  const auto after =
      std::upper_bound(writable_.begin(), writable_.end(), std::pair(first, ~uint64_t{0}));
  return after != writable_.begin() && bytes <= std::prev(after)->second &&
         first <= std::prev(after)->second - bytes;
}

bool is_writable_now(const void* begin, uint64_t bytes) {
  if (bytes == 0) return true;
  if (bytes <= kShort) {
    const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint64_t first = address(begin) / page * page;
    const uint64_t length = (address(begin) + bytes - first + page - 1) / page * page;
    if (::madvise(reinterpret_cast<void*>(first), length, kMadvPopulateWrite) == 0) return true;
  }
  return MemoryMap().is_writable(begin, bytes);
}

}  // namespace tilestone
