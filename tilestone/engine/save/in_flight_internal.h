// What a session knows of its last asynchronous save, and what its next save does about it.
//
// With a communicator, each rank's knowledge travels in its first message of the next save, and the
// coordinator decides for all: one rank may have seen the end of a save while another has not, and
// the program may have asked for the result on one rank only. A rank that has failed may be unable
// to leave its error for the others, which then wait for the deadline. So nobody waits alone:
//
//  1. While the earlier save runs on some rank, and the next save waits for it, the ranks tell each
//     other what they know of it, at least once a second.
//  2. Once one has failed, the coordinator's part ends with that error, and the others hear of it
//     as its outcome, in files. Where no outcome comes, their parts end with it too. A rank that
//     has not ended some seconds later is stuck in the system; nobody waits for it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/run/pending_internal.h"

namespace tilestone::engine {

// One rank's knowledge.
struct InFlight {
  enum class State : uint8_t { kNone, kRunning, kFailed };  // kNone: it ended well, or was reported
  State state = State::kNone;
  bool asked = false;               // kFailed: this rank's program has asked for the result
  bool warns = false;               // kFailed: the failed save's on_error is kWarn
  bool waits = false;               // kRunning: the next save waits for it
  bool skips = false;               // kRunning: the next save is to be skipped, not refused
  std::string what = {};            // "the save ... at ..."
  std::optional<Error> error = {};  // kFailed

  Bytes encoded() const;
  static InFlight decode(ByteView message);
};

// A session's last asynchronous save, on one rank.
struct EarlierSave {
  std::shared_ptr<Pending::State> durable;
  std::shared_ptr<Interrupt> interrupt;  // ends it
  bool warns = false;                    // its on_error
  bool waits = true, skips = false;      // the next save

  InFlight look() const;
  // The same after a second at most. `failure`: of another rank; then this rank's save ends with
  // it.
  InFlight wait(const std::optional<Error>& failure, bool is_coordinator,
                const Deadline& deadline) const;
};

// What the next save does.
struct AfterEarlier {
  enum class Way : uint8_t { kGoOn, kWait, kSkip, kRefuse, kRaise };
  Way way = Way::kGoOn;
  // kRefuse, kRaise: what every rank throws. kWait: why the earlier save has failed on some rank.
  std::optional<Error> error = {};
  std::optional<std::string> warning = {};  // kGoOn: to be logged

  // Of the ways that are an answer of the coordinator (Answer::kEarlier): all but kGoOn.
  Bytes encode() const;
  static AfterEarlier decode(ByteView answer);
};
// `patient`: there is time to wait for ranks whose save has not ended.
AfterEarlier consider(const std::vector<InFlight>& ranks, bool patient = false);

// Thrown on all ranks by planning, for AfterEarlier::Way::kSkip.
struct SkippedSave {};
// For any other way but kGoOn: throws what every rank throws.
[[noreturn]] void heed(const AfterEarlier& after);

}  // namespace tilestone::engine
