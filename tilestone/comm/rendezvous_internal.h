// Decides whether the ranks may begin a call, must fail or must wait. It sends no messages.
// See call.h for the protocol.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"

namespace tilestone::comm_internal {

// What a rank sends when it arrives at a call.
struct Hello {
  uint64_t nonce = 0;
  uint64_t last_operation = 0;
  std::string work, location;                 // the location "" matches every location
  bool failed = false;                        // its last call did not begin on all ranks
  std::chrono::milliseconds since_agreed{0};  // the time since the last call that did
  // The members below are not sent.
  std::optional<Error> left;  // set if the rank left this call while others were missing
  bool may_return = false;    // the rank left before the coordinator arrived or saw its hello, so
                              // it may be about to arrive again
  bool old = false;           // it was on its way, or waited, for long

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

}  // namespace tilestone::comm_internal
