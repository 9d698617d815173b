// Whole items in memory.
#pragma once

#include <string>

#include "tilestone/engine/reader_internal.h"

namespace tilestone::engine {

// One item's bytes after decoding; at most max_size of them (a compressed item that holds more is
// Error(kCorrupt)). The checksum of the whole item is checked where it is known.
Bytes read_item(const ReadContext& context, const ItemLocation& at, const std::string& key,
                uint64_t max_size);

}  // namespace tilestone::engine
