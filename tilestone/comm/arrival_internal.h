// What the two sides of a rendezvous share: the messages, and how long a rank waits for another one
// that has left. See call.h for the protocol.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/comm/rendezvous_internal.h"

namespace tilestone::comm_internal {

// Wait for all ranks of the group to arrive at the call. Return the call's number. The member is
// any rank but the coordinator; `rank` is its number.
uint64_t arrive_as_member(CallPort& port, int rank, const Hello& hello, Deadline deadline);
uint64_t arrive_as_coordinator(CallPort& port, int size, const Hello& own, Deadline deadline);

enum class MessageKind : uint8_t {
  kHello = 1,
  kWithdrawal = 2,
  kGo = 3,
  kRefusal = 4,
  kHere = 5,
  kQuestion = 6,
  kConfirmation = 7
};

// The contents by kind:
//   kHello: a Hello.
//   kWithdrawal: the Hello of the rank that leaves, and its Error.
//   kRefusal: an Error.
//   kGo: the call's number.
//   kHere: empty. It tells a member that the coordinator, which had left, is back.
//   kQuestion: the nonce of the coordinator's hello. The coordinator asks whether the member still
//     waits with the hello of the message's nonce.
//   kConfirmation: the same as the question. The member still waits.
// The nonce is the nonce of the member's hello. A withdrawal of the coordinator has the nonce of
// the member's hello that it answers now or answered last.
Bytes pack(MessageKind kind, uint64_t nonce, ByteView content);
Bytes pack_number(MessageKind kind, uint64_t nonce, uint64_t number);
Bytes pack_withdrawal(uint64_t nonce, const Hello& hello, const Error& why);

struct Unpacked {
  MessageKind kind;
  uint64_t nonce;
  ByteView content;  // a view of the message
};

Unpacked unpack(ByteView bytes);
uint64_t unpack_number(ByteView content);
// The hello of the rank that left, with its error.
Hello unpack_withdrawal(ByteView content, int rank);

// The deadline for the messages of a rank that leaves a call, whether or not its own has passed.
Deadline farewell_deadline();

// The time since the last call that all ranks made.
std::chrono::milliseconds since_agreed(const CallMemory& memory);

// The error for a rank that waited for `rank`, which had left the call and did not come back.
Error not_back(const Hello& own, const Hello& away, int rank);

// Sends the error to the other ranks. Never throws.
void abort_call(CallPort& port, const Error& why);

// Measures how long the ranks that have arrived wait for a rank that is away.
class Grace {
 public:
  explicit Grace(std::chrono::duration<double> length) : length_(length) {}

  // `away`: whether a rank is away now. Returns the deadline of the next wait for notices. While a
  // rank is away the waits are short; after each one the caller checks over() and its own deadline.
  Deadline next_wait(bool away, const Deadline& deadline) {
    if (!away) end_.reset();
    if (!away) return deadline;
    if (!end_) end_ = Deadline::after(length_);
    return Deadline::after(std::min({end_->remaining(), deadline.remaining(), kShortWait}));
  }
  bool over() const { return end_ && end_->expired(); }

 private:
  static constexpr std::chrono::nanoseconds kShortWait = std::chrono::milliseconds(50);

  const std::chrono::duration<double> length_;
  std::optional<Deadline> end_;
};

}  // namespace tilestone::comm_internal
