// Decides which ranks may begin a call, which must fail and which must wait. It sends no messages.
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

inline constexpr size_t kMaxRecentCalls = 16;

uint64_t fingerprint(const std::string& work, const std::string& location);

// What a rank sends when it arrives at a call.
struct Hello {
  uint64_t nonce = 0;
  uint64_t last_operation = 0;
  uint64_t agreed = 0;           // number of the last call that this rank made with all ranks
  std::string work, location;    // the location "" matches every location
  std::vector<uint64_t> recent;  // fingerprints of its last calls, newest first
  uint64_t since = 0;            // how many of `recent` came after the call `agreed`
  std::chrono::milliseconds since_agreed{0};  // the time since that call
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
  kWait,      // this rank has not arrived, or another rank is missing
  kGo,        // all ranks have arrived at the same call
  kBehind,    // the others have already left this rank's call
  kMismatch,  // all ranks have arrived at different calls, and no rank is known to be behind
  kLeft,      // all ranks have arrived at the same call, and one of them has left it
  kAway,      // only ranks that left earlier and may return are missing
};

// hellos[r] is the hello of rank r, or nullopt if it has not arrived. Element [r] of the result is
// the fate of rank r. A rank that may return counts as missing, and its hello is not evidence.
std::vector<Fate> decide(const std::vector<std::optional<Hello>>& hellos);

// Describes which rank is in which call: "rank 0: save at /a; ranks 1 and 2: load at /b".
std::string who_is_where(const std::vector<std::optional<Hello>>& hellos);

}  // namespace tilestone::comm_internal
