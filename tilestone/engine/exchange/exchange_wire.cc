// message = elements, description, tail; tail = u64 size of the elements in bytes, u8 flags
// The elements come first, because they are packed in place before the description is known.
#include "tilestone/engine/exchange/exchange_wire_internal.h"

#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint8_t kMore = 2;  // flag
constexpr size_t kTail = 9;   // bytes

Bytes sealed(Bytes body, ByteView description, uint8_t flags) {
  const uint64_t size = body.size();
  ByteWriter tail;
  tail.u64(size);
  tail.u8(flags);
  body.reserve(size + description.size() + kTail + 1);  // 1: Rounds::exchange appends a status
  body.insert(body.end(), description.begin(), description.end());
  body.insert(body.end(), tail.bytes().begin(), tail.bytes().end());
  return body;
}

struct OpenedMessage {
  ByteView elements;
  ByteView description;
  uint8_t flags;
};

OpenedMessage opened(ByteView message) {
  if (message.size() < kTail) {
    throw Error(ErrorCode::kInternal, "a message of two-phase reading is too short");
  }
  ByteReader tail(message.last(kTail), "a message of two-phase reading");
  const uint64_t size = tail.u64();
  const uint8_t flags = tail.u8();
  const ByteView rest = message.first(message.size() - kTail);
  if (size > rest.size()) tail.fail("the elements extend beyond the message");
  return {rest.first(size), rest.subspan(size), flags};
}

ByteReader reader_of(ByteView description, const char* what, int from) {
  return ByteReader(description, std::string(what) + " of rank " + std::to_string(from));
}

// Writes a list with `walk` (both_ways.h), as a message without elements.
Bytes written_list(const auto& list, const auto& walk) {
  ByteWriter writer;
  walk(writer, list);
  return sealed({}, writer.bytes(), 0);
}

template <typename T>
std::vector<T> read_list(ByteView message, const char* what, int from, const auto& walk) {
  ByteReader reader = reader_of(opened(message).description, what, from);
  std::vector<T> list;
  walk(reader, list);
  reader.expect_end();
  return list;
}

void walk_box(ByteWriter& writer, const Box& box) {
  writer.varint(box.rank());
  wire::box(writer, {}, box);
}
void walk_box(ByteReader& reader, Box& box) {
  wire::box(reader, Dims(static_cast<size_t>(reader.count(2)), INT64_MAX), box);
}

constexpr auto walk_requests = [](auto& io, auto& requests) {
  both::each(io, requests, 4, [&](auto& request) {
    both::varint(io, request.tensor);
    both::varint(io, request.chunk);
    walk_box(io, request.box);
    both::u8(io, request.checked_by_asker);
  });
};

constexpr auto walk_chunks = [](auto& io, auto& chunks) {
  both::each(io, chunks, 2, [&](auto& chunk) {
    both::varint(io, chunk.tensor);
    both::varint(io, chunk.chunk);
  });
};

void walk_round(auto& io, auto& round) {
  both::each(io, round.boxes, 2, [&](auto& sent) {
    both::varint(io, sent.request);
    walk_box(io, sent.box);
  });
  both::each(io, round.checks, 13, [&](auto& check) {
    both::varint(io, check.tensor);
    both::varint(io, check.chunk);
    both::varint(io, check.offset);
    both::varint(io, check.size);
    both::u32(io, check.crc);
    both::varint(io, check.record_size);
    both::u32(io, check.record_crc32);
  });
  both::varint(io, round.shared_at);
  both::varint(io, round.shared_bytes);
}

}  // namespace

void fail_exchange(int rank, const std::string& problem) {
  throw Error(ErrorCode::kInternal, "two-phase reading: " + problem).with_rank(rank);
}

bool more_in(ByteView message) { return (opened(message).flags & kMore) != 0; }

Bytes with_note(const std::string& note, ByteView message) {
  const OpenedMessage open = opened(message);
  return sealed(to_bytes(note), open.description, open.flags);
}

std::string note_of(ByteView message) { return std::string(as_text(opened(message).elements)); }

Bytes encode_requests(std::span<const TileRequest> requests) {
  return written_list(requests, walk_requests);
}

std::vector<TileRequest> decode_requests(ByteView message, int from) {
  return read_list<TileRequest>(message, "requests", from, walk_requests);
}

Bytes encode_chunks(std::span<const ChunkRef> chunks) { return written_list(chunks, walk_chunks); }

std::vector<ChunkRef> decode_chunks(ByteView message, int from) {
  return read_list<ChunkRef>(message, "damaged chunks", from, walk_chunks);
}

Bytes encode_verdicts(const std::vector<bool>& served, bool more) {
  ByteWriter writer;
  writer.varint(served.size());
  for (const bool one : served) writer.u8(one ? 1 : 0);
  return sealed({}, writer.bytes(), more ? kMore : 0);
}

std::vector<bool> decode_verdicts(ByteView message, int from) {
  ByteReader reader = reader_of(opened(message).description, "verdicts", from);
  std::vector<bool> served(reader.count());
  for (size_t i = 0; i < served.size(); ++i) served[i] = reader.u8() != 0;
  reader.expect_end();
  return served;
}

Bytes encode_round(Bytes elements, const RoundMessage& message, bool more) {
  ByteWriter writer;
  walk_round(writer, message);
  return sealed(std::move(elements), writer.bytes(), more ? kMore : 0);
}

RoundMessage decode_round(ByteView message, int from) {
  const OpenedMessage open = opened(message);
  ByteReader reader = reader_of(open.description, "elements", from);
  RoundMessage round;
  round.elements = open.elements;
  walk_round(reader, round);
  reader.expect_end();
  return round;
}

}  // namespace tilestone::engine
