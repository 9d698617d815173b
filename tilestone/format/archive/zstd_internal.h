#pragma once

#include "tilestone/base/bytes.h"

namespace tilestone::archive {

// Decompresses one zstd stream (any number of frames). Error(kCorrupt) if it is damaged, truncated,
// or has more than `max_size` bytes.
Bytes zstd_decompress(ByteView compressed, uint64_t max_size);

// One frame, compressed fast rather than small.
Bytes zstd_compress(ByteView bytes);

}  // namespace tilestone::archive
