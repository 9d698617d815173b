// Finds where the elements of stored chunks are, from the manifest or from the items' headers.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/context_internal.h"

namespace tilestone::engine {

struct ChunkRef {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  uint32_t copy = kNoCopy;  // where it is read: index into Metadata::copies; kNoCopy: its own item
};

const ItemLocation& place_of(const ReadContext& context, ChunkRef chunk);

// Logs a warning that names key and file: the chunk is damaged there and will be read from another
// place. `error` says what is wrong.
void warn_of_damage(const Error& error, const ReadContext& context, ChunkRef chunk);
// The same for an object or chunk of `key` in `file`.
void warn_of_damage(const Error& error, const std::string& key, const std::string& file);

// Logs, once for a load or an open checkpoint, that a part of the chunk is read and can't be
// checked.
void log_unchecked_parts(const ReadContext& context, ChunkRef chunk);

// Returns one payload for each chunk, in order. Chunks that are compressed as a whole get an empty
// one: they must be read and decoded first. An item's header must agree with the metadata and with
// the item's length, else Error(kCorrupt) with key and file. With `unread`, a chunk whose header
// does not agree, or that the disk can't read, gets an empty payload and is passed to `unread` (by
// one thread at a time); the others go on.
using UnreadChunk = std::function<void(size_t index, const Error& error)>;
std::vector<StoredPayload> find_payloads(const ReadContext& context,
                                         std::span<const ChunkRef> chunks,
                                         const UnreadChunk& unread = {});

// The payload of a whole item in memory, after decoding.
StoredPayload payload_in(const ReadContext& context, ChunkRef chunk, ByteView item);

// Throws Error(kCorrupt) "the item at offset N `problem`", with key and file.
[[noreturn]] void fail_chunk(const ReadContext& context, ChunkRef chunk,
                             const std::string& problem);

// Throws as fail_chunk() unless the CRC-32 `found` of a record of `size` bytes equals `expected`.
void expect_record(const ReadContext& context, ChunkRef chunk, uint64_t size, uint32_t expected,
                   uint32_t found);

}  // namespace tilestone::engine
