// What a session knows of its last asynchronous save, and what its next save does about it.
//
// With a communicator, each rank's knowledge travels in its first message of the next save, and the
// coordinator decides for all: one rank may have seen the end of a save while another has not, and
// the program may have asked for the result on one rank only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"

namespace tilestone::engine {

// One rank's knowledge.
struct InFlight {
  enum class State : uint8_t { kNone, kRunning, kFailed };  // kNone: it ended well, or was reported
  State state = State::kNone;
  bool asked = false;               // kFailed: this rank's program has asked for the result
  bool warns = false;               // kFailed: the failed save's on_error is kWarn
  bool skips = false;               // kRunning: the next save is to be skipped, not refused
  std::string what = {};            // "the save ... at ..."
  std::optional<Error> error = {};  // kFailed

  void encode(ByteWriter& out) const;
  static InFlight decode(ByteReader& in);
};

// What the next save does.
struct AfterEarlier {
  enum class Way : uint8_t { kGoOn, kSkip, kRefuse, kRaise };
  Way way = Way::kGoOn;
  std::optional<Error> error = {};          // kRefuse, kRaise: what every rank throws
  std::optional<std::string> warning = {};  // kGoOn: to be logged

  // Of the ways that are an answer of the coordinator: all but kGoOn.
  void encode(ByteWriter& out) const;
  static AfterEarlier decode(ByteReader& in);
};
AfterEarlier consider(const std::vector<InFlight>& ranks);

// Thrown on all ranks by planning, for AfterEarlier::Way::kSkip.
struct SkippedSave {};
// For any other way but kGoOn: throws what every rank throws.
[[noreturn]] void heed(const AfterEarlier& after);

}  // namespace tilestone::engine
