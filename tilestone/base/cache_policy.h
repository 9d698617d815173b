#pragma once

#include <cstdint>

namespace tilestone {

// What happens to the bytes that a read brings from the disk.
enum class CachePolicy : uint8_t {
  kBypass,  // large ranges bypass the page cache if that is as fast, so nobody else loses memory
  kKeep,    // the bytes stay in the page cache, so reading them again needs no disk access
  kAuto,  // kKeep while there is room (ReadOptions::room); kBypass for the rest, and for everything
          // once the storage has measured that keeping is clearly slower
};

}  // namespace tilestone
