// The rendezvous of a call: the decision, which is pure, and what its two sides share. See call.h
// for the protocol.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/call_port.h"

namespace tilestone::comm_internal {

// What a rank sends when it arrives at a call.
struct Hello {
  uint64_t nonce = 0;
  uint64_t last_operation = 0;
  std::string work, location;  // the location "" matches every location
  // The members below are not sent.
  std::optional<Error> left;  // set if the rank left this call while others were missing
  bool may_return = false;    // the rank left before the coordinator arrived or saw its hello, so
                              // it may be about to arrive again

  std::string name() const;  // "save at /checkpoints/5"
  Bytes encode() const;
  static Hello decode(ByteView bytes);
};

bool same_call(const Hello& a, const Hello& b);

enum class Fate {
  kWait,      // a rank is missing
  kGo,        // all ranks have arrived at the same call
  kMismatch,  // all ranks have arrived, at different calls
  kLeft,      // all ranks have arrived at the same call, and one of them has left it
  kAway,      // only ranks that left earlier and may return are missing
};

// hellos[r] is the hello of rank r, or nullopt if it has not arrived. A rank that may return counts
// as missing, and it may return to another call.
Fate decide(const std::vector<std::optional<Hello>>& hellos);

// Describes which rank is in which call: "rank 0: save at /a; ranks 1 and 2: load at /b".
std::string who_is_where(const std::vector<std::optional<Hello>>& hellos);

// ---- What the two sides of a rendezvous share

// Wait for all ranks of the group to arrive at the call. Return the call's number. The member is
// any rank but the coordinator; `rank` is its number.
uint64_t arrive_as_member(CallPort& port, int rank, const Hello& hello, Deadline deadline);
uint64_t arrive_as_coordinator(CallPort& port, int size, const Hello& own, Deadline deadline);

enum class NoticeOf : uint8_t {
  kHello = 1,       // hello
  kWithdrawal = 2,  // hello, error: of the rank that leaves
  kGo = 3,          // number: of the call
  kRefusal = 4,     // error
  kHere = 5         // tells a member that the coordinator, which had left, is back
};

// What a rank says of a call. The nonce is that of the member's hello. A withdrawal of the
// coordinator has the nonce of the member's hello that it answers now or answered last.
struct CallNotice {
  NoticeOf kind;
  uint64_t nonce = 0;
  uint64_t number = 0;
  std::optional<Hello> hello = {};
  std::optional<Error> error = {};

  Notice to(int rank) const;
  // A withdrawal's hello then has the error, with the number of the rank that has left.
  static CallNotice from(const Notice& notice);
};

// The deadline for the messages of a rank that leaves a call, whether or not its own has passed.
Deadline farewell_deadline();

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
