// The messages of two-phase reading.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/geometry/box.h"

namespace tilestone::engine {

// Throws Error(kInternal): `rank` sent something that can't be right, as `problem` says.
[[noreturn]] void fail_exchange(int rank, const std::string& problem);

// Whether the sender has more rounds after this message. Allocates nothing.
bool more_in(ByteView message);

// A text that goes with requests or verdicts; "": none.
Bytes with_note(const std::string& note, ByteView message);
std::string note_of(ByteView message);

// A box of a chunk that a rank requests from a tile's owner. A request's number is its index among
// the requests of that rank to that owner.
struct TileRequest {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  Box box;  // in the chunk's own coordinates, inside one tile
  // The rank checks the blocks of the box itself, so their owner need not.
  bool checked_by_asker = false;
};
Bytes encode_requests(std::span<const TileRequest> requests);
// `from`: the sender's rank, for error messages.
std::vector<TileRequest> decode_requests(ByteView message, int from);

// Damaged chunks; ChunkRef::copy is not sent.
Bytes encode_chunks(std::span<const ChunkRef> chunks);
std::vector<ChunkRef> decode_chunks(ByteView message, int from);

// An owner's answer to one rank: whether it serves each request.
Bytes encode_verdicts(const std::vector<bool>& served, bool more);
std::vector<bool> decode_verdicts(ByteView message, int from);

// The part of a request's box that a round's message serves.
struct SentBox {
  uint32_t request = 0;  // the request's number
  Box box;               // in the chunk's own coordinates
};

// The CRC-32 of a tile that was read whole, sent to the rank that checks the chunk.
struct TileCheck {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  uint64_t offset = 0;  // in the record, bytes
  uint64_t size = 0;    // bytes
  uint32_t crc = 0;
  uint64_t record_size = 0;   // bytes
  uint32_t record_crc32 = 0;  // as recorded
};

// One round's message from an owner to a rank: the elements of the boxes, then their description.
// The elements of each box are C-contiguous; the boxes follow one another without gaps. By the page
// cache there are no elements.
struct RoundMessage {
  std::vector<SentBox> boxes;
  std::vector<TileCheck> checks;
  ByteView elements;  // set by decode_round()
  // If shared_bytes is not 0, the elements are in the sender's memory (HostMemory) instead.
  uint64_t shared_at = 0;
  uint64_t shared_bytes = 0;
};
// Appends the description to `elements`, which becomes the message.
Bytes encode_round(Bytes elements, const RoundMessage& message, bool more);
// The result borrows `message`.
RoundMessage decode_round(ByteView message, int from);

}  // namespace tilestone::engine
