// Agreement: the steps of a save or load, each of which all ranks take together and which ends the
// same way on every rank.
//
// The constructor begins the call (comm/call.h): it returns when every rank has come to this save
// or load. What can fail on one rank alone belongs into the local step of the first round, so that
// the others learn of it at once.
//
// A round:
//  1. every rank runs its local step; an exception becomes an Error with the rank's number;
//  2. {status, payload} of each rank is gathered to the coordinator (rank 0);
//  3. when all went well the coordinator's step turns the payloads into one answer for each rank;
//     else the lowest failed rank's own error is the outcome, or one that names the ranks that
//     are missing;
//  4. {status, answer} goes to each rank, which returns the answer or throws the same Error.
//
// An exception that is no Error (code of the caller threw it) becomes an Error for the other ranks,
// and this rank rethrows the original once the round has ended.
//
// An interrupt of the deadline ends the call at once, wherever this rank stands: the others get
// kInterrupted with its number in their next message of the call, and this rank rethrows the
// interrupt's reason. Only when this rank waits to hear the outcome of the last round, which it has
// agreed to, the others go on without it. The same holds for what code of the caller throws while a
// rank waits in a round's messages (a signal handler that raises, in Python).
//
// Time: of what is left at the start of a round a local step may use 8 tenths, the gathering ends
// at 9, and the last tenth is for the answers to the others. A rank that hears nothing from the
// coordinator throws an error that names the coordinator and the phase. Every rank takes part in
// both collectives of a round whatever happens to it, so the group stays in step.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/call.h"
#include "tilestone/comm/communicator.h"

namespace tilestone::engine {

class Rounds {
 public:
  // `work` ("save", "load") and the phases' names stand in the messages. `place`: the location, the
  // same text on every rank; "" where this rank can't say it (its first round says why). Throws
  // what Call throws.
  Rounds(Communicator comm, std::string work, std::string place, Deadline deadline);

  using LocalStep = std::function<Bytes(Deadline)>;
  // payloads[r] is rank r's; the result's [r] is for rank r, or the result is empty: nothing for
  // anybody. Runs on the coordinator alone.
  using CoordinatorStep = std::function<std::vector<Bytes>(std::vector<Bytes> payloads)>;

  // `phase` completes "rank 3 failed while ...": "writing".
  Bytes run(std::string_view phase, const LocalStep& local, const CoordinatorStep& coordinate);

  // run() in two halves, for a local step after which this rank has something else to do: begin()
  // runs the local step and keeps what it came to, end() tells the others. Between the two there is
  // no other round. begin() throws only what ends the call at once (see above).
  void begin(std::string_view phase, const LocalStep& local);
  Bytes end(const CoordinatorStep& coordinate);

  // This rank takes part in no further round: the others throw `why`, with this rank's number where
  // it has none, in their next message of the call.
  void leave(const Error& why) noexcept { call_.abort(why); }

  // The last round: what it decides stands, so that a rank that died before it got the outcome is
  // no failure of the others.
  Bytes run_last(std::string_view phase, const LocalStep& local, const CoordinatorStep& coordinate);

 private:
  struct Outcome {
    std::optional<Error> error;
    Bytes answer;
  };
  struct Begun {
    std::string phase;
    Deadline gather_deadline;
    Outcome mine;
  };
  Begun take_local_step(std::string_view phase, const LocalStep& local);
  Bytes finish(Begun begun, const CoordinatorStep& coordinate, bool last);
  Outcome local_outcome(const LocalStep& local, Deadline deadline);
  std::optional<Error> gather(std::string_view phase, const Outcome& mine, Deadline deadline,
                              std::vector<Bytes>& payloads);
  Outcome decide(const CoordinatorStep& coordinate, std::optional<Error> failure,
                 std::vector<Bytes> payloads, std::vector<Bytes>& messages);
  void send_outcome(std::string_view phase, std::vector<Bytes> messages, const Outcome& own,
                    bool last);
  Outcome receive_outcome(std::string_view phase, const std::optional<Error>& unsent, bool last);

  bool interrupted() const;
  // Throws the interrupt's reason, once one was requested, after it was reported to the others.
  void end_if_interrupted();
  // In a catch block: reports to the others that this rank leaves for what was thrown, and rethrows
  // it.
  [[noreturn]] void end_call();

  Communicator comm_;
  std::string work_;
  Deadline deadline_;
  Call call_;
  std::optional<Begun> begun_;        // by begin(), until end()
  std::optional<Error> undelivered_;  // coordinator: of an outcome; fails what follows
};

}  // namespace tilestone::engine
