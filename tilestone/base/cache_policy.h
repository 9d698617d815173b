#pragma once

#include <cstdint>

namespace tilestone {

// What happens to the bytes that a read brings from the disk.
enum class CachePolicy : uint8_t {
  kBypass,  // large ranges bypass the page cache, so nobody else loses memory
  kKeep,    // the bytes stay in the page cache, so reading them again needs no disk access
};

}  // namespace tilestone
