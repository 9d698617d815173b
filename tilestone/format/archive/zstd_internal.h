#pragma once

#include "tilestone/base/bytes.h"

namespace tilestone::archive {

// One zstd stream (any number of frames) undone. Error(kCorrupt) when it is broken, truncated, or
// holds more than max_size bytes.
Bytes zstd_decompress(ByteView compressed, uint64_t max_size);

}  // namespace tilestone::archive
