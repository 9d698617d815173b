// Checksums. CRC-32 (zip's polynomial) guards items, as torch's own archives do; XXH3 guards
// Tilestone's own small files. ISA-L and xxHash do the work.
#pragma once

#include <cstdint>

#include "tilestone/base/bytes.h"

namespace tilestone {

// CRC-32 of `bytes` continued from `seed` (0 at the start). zlib's crc32().
uint32_t crc32(ByteView bytes, uint32_t seed = 0);

// CRC-32 of A followed by B, from crc(A), crc(B) and B's length in bytes. zlib's crc32_combine().
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

// Copies `source` to `target` (same size, no overlap) and returns the CRC-32 continued from
// `seed`. One pass over memory: blocks are copied while they are in the first-level cache. The
// source must not change meanwhile, or the checksum belongs to neither.
uint32_t copy_crc32(MutableByteView target, ByteView source, uint32_t seed = 0);

uint64_t xxh3_64(ByteView bytes);

}  // namespace tilestone
