#pragma once

#include "tilestone/base/bytes.h"

namespace tilestone::archive {

// Decompresses one zstd stream (any number of frames). Error(kCorrupt) if it is damaged, truncated,
// or has more than `max_size` bytes.
Bytes zstd_decompress(ByteView compressed, uint64_t max_size);

// The same into memory of exactly the size that the stream has, else Error(kCorrupt).
void zstd_decompress_into(ByteView compressed, MutableByteView out);
// Whether the stream says that it is one frame of that size; it may still be damaged.
bool zstd_says_size(ByteView compressed, uint64_t size);

// One frame, which says its size, compressed fast rather than small.
Bytes zstd_compress(ByteView bytes);

}  // namespace tilestone::archive
