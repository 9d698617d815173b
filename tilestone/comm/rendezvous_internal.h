// Which ranks may begin a call, which must go, and which must wait: the decision alone, without
// messages. See call.h for the protocol.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"

namespace tilestone::comm_internal {

inline constexpr size_t kMaxRecentCalls = 16;

uint64_t fingerprint(const std::string& work, const std::string& place);

// What a rank says when it comes to a call.
struct Hello {
  uint64_t nonce = 0;
  uint64_t last_operation = 0;
  uint64_t agreed = 0;           // number of the last call that it made with all ranks
  std::string work, place;       // place "": fits every place
  std::vector<uint64_t> recent;  // fingerprints of its last calls, newest first
  uint64_t since = 0;            // how many of them came after `agreed`
  // Not sent: the rank came to this call and left it while others were missing.
  std::optional<Error> left;
  bool may_return = false;  // it left before the coordinator came, which so can't know the order

  std::string name() const;  // "save at /checkpoints/5"
  Bytes encode() const;
  static Hello decode(ByteView bytes);
};

bool same_call(const Hello& a, const Hello& b);

enum class Fate {
  kWait,      // not here, or somebody else is missing
  kGo,        // all are here and mean the same call
  kBehind,    // the others have left this rank's call already
  kMismatch,  // all are here and contradict each other, and nobody is known to be behind
  kLeft,      // all have come, and one of them has left
  kAway,      // all others have come, and those who left earlier are not back
};

// hellos[r] is rank r's, when it is here. The result's [r] is rank r's fate. A rank that may return
// counts as missing, and as evidence of nothing.
std::vector<Fate> decide(const std::vector<std::optional<Hello>>& hellos);

// Who is in which call: "rank 0: save at /a; ranks 1 and 2: load at /b".
std::string who_is_where(const std::vector<std::optional<Hello>>& hellos);

}  // namespace tilestone::comm_internal
