// Whole items in memory.
#pragma once

#include <string>

#include "tilestone/engine/read/reader_internal.h"

namespace tilestone::engine {

// One item's bytes after decoding; at most max_size of them (a compressed item that holds more is
// Error(kCorrupt)). The checksum of the whole item is checked where it is known.
Bytes read_item(const ReadContext& context, const ItemLocation& at, const std::string& key,
                uint64_t max_size);

// How many bytes a compressed item may become: of an object 1,024 times its length, of a chunk 64
// times its elements (a storage may be larger than its tensor), and 16 MiB for what surrounds them.
uint64_t decoded_limit(const ItemLocation& object);
uint64_t decoded_limit(const StoredTensor& tensor, const StoredChunk& chunk);

// Before memory is taken for a tensor that only the metadata speaks of: Error(kCorrupt), naming key
// and file, unless the files can hold the elements of these chunks. A byte of an item may stand for
// 1,024 of the tensor (expanded views), one of a compressed item for 65,536 (zstd's own limit is
// half of that). `bytes`: of the wanted elements; 64 MiB and less are not asked about.
void expect_stored(const ReadContext& context, uint64_t bytes, const StoredTensor& tensor,
                   std::span<const uint32_t> chunks);

}  // namespace tilestone::engine
