// Reading whole items into memory.
#pragma once

#include <string>

#include "tilestone/engine/read/reader_internal.h"

namespace tilestone::engine {

// One item's bytes after decoding. Error(kCorrupt) if a compressed item decodes to more than
// max_size bytes. Checks the checksum of the whole item if it is known.
Bytes read_item(const ReadContext& context, const ItemLocation& at, const std::string& key,
                uint64_t max_size);

// Limit on the decoded size of a compressed item, bytes: for an object 1,024 times its length; for
// a chunk 64 times its elements, because its torch storage may be larger than the tensor. Each plus
// 16 MiB for headers and padding.
uint64_t decoded_limit(const ItemLocation& object);
uint64_t decoded_limit(const StoredTensor& tensor, const StoredChunk& chunk);

// Call before allocating memory for a tensor whose size only the metadata states. Error(kCorrupt),
// naming the key, if the files are too small for the elements of these chunks. One byte of an item
// may stand for 1,024 bytes of the tensor (expanded views), one byte of a compressed item for
// 65,536 (zstd's own limit is half of that). `bytes`: size of the wanted elements; nothing is
// checked up to 64 MiB.
void expect_stored(const ReadContext& context, uint64_t bytes, const StoredTensor& tensor,
                   std::span<const uint32_t> chunks);

}  // namespace tilestone::engine
