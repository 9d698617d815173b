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

// Error(kInternal): what a rank sent can't be right.
[[noreturn]] void fail_exchange(int rank, const std::string& problem);

// A rank's failure in the place of any message.
Bytes encode_failure(const Error& error);
// What failed at the sender, or nullopt.
std::optional<Error> failure_in(ByteView message);
// Whether the sender has elements to send after this message, to whomever. Allocates nothing.
bool more_in(ByteView message);

// A box of a chunk that a rank asks a tile's owner for. Named by its place among what the rank
// asked that owner for.
struct Request {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  Box box;  // in the chunk's own coordinates, inside one tile
};
Bytes encode_requests(std::span<const Request> requests);
// `from`: the sender, for messages.
std::vector<Request> decode_requests(ByteView message, int from);

// Chunks, by their numbers.
Bytes encode_chunks(std::span<const ChunkRef> chunks);
std::vector<ChunkRef> decode_chunks(ByteView message, int from);

// An owner's answer to one rank: whether it serves each request.
Bytes encode_verdicts(const std::vector<bool>& served, bool more);
std::vector<bool> decode_verdicts(ByteView message, int from);

// A part of a request's box whose elements are in the message.
struct SentBox {
  uint32_t request = 0;
  Box box;  // in the chunk's own coordinates
};

// The CRC-32 of a tile that was read whole, for the rank that checks the chunk.
struct TileCheck {
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  uint64_t offset = 0;  // in the record, bytes
  uint64_t size = 0;    // bytes
  uint32_t crc = 0;
  uint64_t record_size = 0;   // bytes
  uint32_t record_crc32 = 0;  // as recorded
};

// One round's message from an owner to a rank: the boxes' elements, C-contiguous, in the order of
// the boxes and without gaps, then what describes them.
struct RoundMessage {
  std::vector<SentBox> boxes;
  std::vector<TileCheck> checks;
  ByteView elements;  // decoded only
};
// `elements` becomes the message.
Bytes encode_round(Bytes elements, const RoundMessage& message, bool more);
// Borrows the message.
RoundMessage decode_round(ByteView message, int from);

}  // namespace tilestone::engine
