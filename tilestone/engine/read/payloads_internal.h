// Where the elements of stored chunks are: from the manifest, or by looking into the items.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilestone/engine/read/context_internal.h"

namespace tilestone::engine {

struct ChunkRef {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
};

// One payload for each chunk, in order. Chunks that are compressed as a whole get an empty one:
// they are to be read and decoded first. What an item says is checked against the metadata and the
// item's length: Error(kCorrupt) with key and file.
std::vector<StoredPayload> find_payloads(const ReadContext& context,
                                         std::span<const ChunkRef> chunks);

// The payload of a whole item in memory (after decoding).
StoredPayload payload_in(const ReadContext& context, ChunkRef chunk, ByteView item);

// Error(kCorrupt): "the item at offset N `problem`", with key and file.
[[noreturn]] void fail_chunk(const ReadContext& context, ChunkRef chunk,
                             const std::string& problem);

// Throws as fail_chunk unless the CRC-32 `found` of a record of `size` bytes is the one expected.
void expect_record(const ReadContext& context, ChunkRef chunk, uint64_t size, uint32_t expected,
                   uint32_t found);

}  // namespace tilestone::engine
