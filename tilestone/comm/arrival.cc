#include "tilestone/comm/arrival_internal.h"

#include <string>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone::comm_internal {

Bytes pack(MessageKind kind, uint64_t nonce, ByteView content) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(kind));
  writer.u64(nonce);
  writer.raw(content);
  return std::move(writer).take();
}

Bytes pack_number(MessageKind kind, uint64_t nonce, uint64_t number) {
  ByteWriter content;
  content.u64(number);
  return pack(kind, nonce, content.bytes());
}

Bytes pack_withdrawal(uint64_t nonce, const Hello& hello, const Error& why) {
  ByteWriter content;
  content.blob(hello.encode());
  content.blob(why.encode());
  return pack(MessageKind::kWithdrawal, nonce, content.bytes());
}

Unpacked unpack(ByteView bytes) {
  ByteReader reader(bytes, "notice of a call");
  const auto kind = static_cast<MessageKind>(reader.u8());
  const uint64_t nonce = reader.u64();
  return {kind, nonce, reader.raw(reader.remaining())};
}

uint64_t unpack_number(ByteView content) {
  ByteReader reader(content, "notice of a call");
  return reader.u64();
}

Hello unpack_withdrawal(ByteView content, int rank) {
  ByteReader reader(content, "notice of a call");
  Hello hello = Hello::decode(reader.blob());
  hello.left = Error::decode(reader.blob()).with_rank(rank);
  reader.expect_end();
  return hello;
}

Deadline farewell_deadline() { return Deadline::after(std::chrono::seconds(1)); }

std::chrono::milliseconds since_agreed(const CallMemory& memory) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                               memory.agreed_at);
}

Error not_back(const Hello& own, const Hello& away, int rank) {
  return Error(away.left->code(),
               own.name() + ": rank " + std::to_string(rank) +
                   " left the call and did not come back: " + away.left->message())
      .with_rank(rank)
      .with_hint("repeat the call on every rank");
}

void abort_call(CallPort& port, const Error& why) {
  try {
    port.abort(why);
  } catch (...) {
    log(LogLevel::kWarning, std::string("could not send this rank's error to the other ranks: ") +
                                current_error().what());
  }
}

}  // namespace tilestone::comm_internal
