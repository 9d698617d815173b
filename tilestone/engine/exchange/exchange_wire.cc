// message = elements, description, tail; tail = u64 size of the elements in bytes, u8 flags
// The elements come first, because they are packed in place before the description is known.
#include "tilestone/engine/exchange/exchange_wire_internal.h"

#include <utility>

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

void put(ByteWriter& writer, const Box& box) {
  writer.varint(box.rank());
  wire::write_box(writer, box);
}

Box get_box(ByteReader& reader) {
  return wire::read_box(reader, Dims(static_cast<size_t>(reader.count(2)), INT64_MAX));
}

void put(ByteWriter& writer, const TileCheck& check) {
  writer.varint(check.tensor);
  writer.varint(check.chunk);
  writer.varint(check.offset);
  writer.varint(check.size);
  writer.u32(check.crc);
  writer.varint(check.record_size);
  writer.u32(check.record_crc32);
}

TileCheck get_check(ByteReader& reader) {
  TileCheck check;
  check.tensor = static_cast<uint32_t>(reader.varint());
  check.chunk = static_cast<uint32_t>(reader.varint());
  check.offset = reader.varint();
  check.size = reader.varint();
  check.crc = reader.u32();
  check.record_size = reader.varint();
  check.record_crc32 = reader.u32();
  return check;
}

}  // namespace

void fail_exchange(int rank, const std::string& problem) {
  throw Error(ErrorCode::kInternal, "two-phase reading: " + problem).with_rank(rank);
}

bool more_in(ByteView message) { return (opened(message).flags & kMore) != 0; }

Bytes encode_requests(std::span<const TileRequest> requests) {
  ByteWriter writer;
  writer.varint(requests.size());
  for (const TileRequest& request : requests) {
    writer.varint(request.tensor);
    writer.varint(request.chunk);
    put(writer, request.box);
    writer.u8(request.checked_by_asker ? 1 : 0);
  }
  return sealed({}, writer.bytes(), 0);
}

std::vector<TileRequest> decode_requests(ByteView message, int from) {
  ByteReader reader = reader_of(opened(message).description, "requests", from);
  std::vector<TileRequest> requests(reader.count(4));
  for (TileRequest& request : requests) {
    request.tensor = static_cast<uint32_t>(reader.varint());
    request.chunk = static_cast<uint32_t>(reader.varint());
    request.box = get_box(reader);
    request.checked_by_asker = reader.u8() != 0;
  }
  reader.expect_end();
  return requests;
}

Bytes encode_chunks(std::span<const ChunkRef> chunks) {
  ByteWriter writer;
  writer.varint(chunks.size());
  for (const ChunkRef& chunk : chunks) {
    writer.varint(chunk.tensor);
    writer.varint(chunk.chunk);
  }
  return sealed({}, writer.bytes(), 0);
}

std::vector<ChunkRef> decode_chunks(ByteView message, int from) {
  ByteReader reader = reader_of(opened(message).description, "damaged chunks", from);
  std::vector<ChunkRef> chunks(reader.count(2));
  for (ChunkRef& chunk : chunks) {
    chunk.tensor = static_cast<uint32_t>(reader.varint());
    chunk.chunk = static_cast<uint32_t>(reader.varint());
  }
  reader.expect_end();
  return chunks;
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
  writer.varint(message.boxes.size());
  for (const SentBox& sent : message.boxes) {
    writer.varint(sent.request);
    put(writer, sent.box);
  }
  writer.varint(message.checks.size());
  for (const TileCheck& check : message.checks) put(writer, check);
  return sealed(std::move(elements), writer.bytes(), more ? kMore : 0);
}

RoundMessage decode_round(ByteView message, int from) {
  const OpenedMessage open = opened(message);
  ByteReader reader = reader_of(open.description, "elements", from);
  RoundMessage round;
  round.elements = open.elements;
  round.boxes.resize(reader.count(2));
  for (SentBox& sent : round.boxes) {
    sent.request = static_cast<uint32_t>(reader.varint());
    sent.box = get_box(reader);
  }
  round.checks.resize(reader.count(13));
  for (TileCheck& check : round.checks) check = get_check(reader);
  reader.expect_end();
  return round;
}

}  // namespace tilestone::engine
