// Rounds: the steps of a save or load. All ranks take each step together, and it has the same
// outcome on every rank.
//
// The constructor begins the call (comm/call.h): it returns when every rank has reached this save
// or load. Work that can fail on a single rank belongs in the local step of the first round, so
// that the others learn of a failure at once.
//
// A round:
//  1. Every rank runs its local step. An exception becomes an Error with the rank's number.
//  2. {status, payload} of each rank is gathered at the coordinator (rank 0).
//  3. If all ranks succeeded, the coordinator's step turns the payloads into one answer for each
//     rank. Otherwise the outcome is the error of the lowest failed rank, or an error that names
//     the missing rank.
//  4. {status, answer} is sent to each rank, which returns the answer or throws the same Error.
//
// An exception that is not an Error (the caller's code threw it) becomes an Error on the other
// ranks. This rank rethrows the original exception when the round has ended.
//
// An interrupt of the deadline ends the call at once, at whatever point this rank is. The other
// ranks get kInterrupted with this rank's number in their next message of the call, and this rank
// rethrows the interrupt's reason. There is one exception: while this rank waits for the outcome of
// the last round, to which it has agreed, the others go on without it. The same holds for an
// exception that the caller's code throws while a rank waits for a round's messages (in Python, a
// signal handler that raises).
//
// Time: of the time that is left at the start of a round, the local step may use 80 %, the
// gathering ends after 90 %, and the rest is for sending the answers. A rank that gets no answer
// from the coordinator throws an error that names the coordinator and the phase. Every rank takes
// part in both collectives of a round, even after a failure, so that the group stays in step.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/call.h"
#include "tilestone/comm/communicator.h"

namespace tilestone::engine {

class Rounds {
 public:
  // Error messages contain `work` ("save", "load") and the names of the phases. `location`: the
  // location, the same text on every rank; "" if this rank can't determine it (its first round
  // then reports why). Throws what Call throws.
  Rounds(Communicator comm, std::string work, std::string location, Deadline deadline);

  using LocalStep = std::function<Bytes(Deadline)>;
  // payloads[r] is from rank r; element r of the result is for rank r. An empty result is an empty
  // answer for every rank. Runs only on the coordinator.
  using CoordinatorStep = std::function<std::vector<Bytes>(std::vector<Bytes> payloads)>;

  // Whether a round that has failed with this error on this rank has ended on all others, too, with
  // their local steps.
  static bool reached_all(const Error& error) {
    return error.code() != ErrorCode::kTimeout && error.code() != ErrorCode::kRankFailed &&
           error.code() != ErrorCode::kInterrupted;
  }

  // `phase` completes "rank 3 did not report after ...": "writing".
  Bytes run(std::string_view phase, const LocalStep& local, const CoordinatorStep& coordinate) {
    return run(phase, local, coordinate, false, {});
  }

  const Communicator& comm() const { return comm_; }
  Deadline deadline() const { return deadline_; }

  // Runs work between two rounds. Its failure is returned, because the others learn of it in the
  // next round. Only an interrupt's reason is thrown: it ends the call at once (see above).
  template <typename Work>
  auto result_or_error(const Work& work) -> std::variant<std::invoke_result_t<Work>, Error> {
    try {
      return work();
    } catch (...) {
      const Error error = current_error();
      end_if_interrupted();
      return error;
    }
  }

  // Collectives between two rounds, of which each is one operation of the communicator. Throw what
  // it throws, perhaps not on every rank: take them within result_or_error().
  //  - exchange: element r of the result of `local` goes to rank r, and element r of what is
  //    returned came from rank r. If `local` throws on any rank, every rank throws the error of the
  //    lowest one. Error(kTimeout) once `deadline` has passed.
  //  - broadcast: returns the coordinator's bytes on every rank.
  using Messages = std::vector<Bytes>;
  Messages exchange(std::string_view phase, Deadline deadline,
                    const std::function<Messages()>& local);
  Bytes broadcast(ByteView bytes, Deadline deadline);

  // On the coordinator: why an outcome did not reach every rank. The next round will fail, so there
  // is no point in working for it.
  const std::optional<Error>& undelivered() const { return undelivered_; }

  // This rank takes part in no further round. The others throw `why` in their next message of the
  // call, with this rank's number if it has none.
  void leave(const Error& why) noexcept { call_.abort(why); }

  // Returns this rank's answer if it finds out by itself that the round has succeeded. Must not
  // throw.
  using FindAnswer = std::function<std::optional<Bytes>(const Error& lost)>;

  // The last round. Its outcome is final: a rank that dies before it gets the outcome does not make
  // the others fail. The coordinator's process may end as soon as this has returned: the others
  // have their answers by then. If the answer of a rank is lost all the same, because the
  // coordinator was killed or cut off, `find` runs there before the rank reports an error, unless
  // its local step has failed.
  Bytes run_last(std::string_view phase, const LocalStep& local, const CoordinatorStep& coordinate,
                 const FindAnswer& find = {}) {
    return run(phase, local, coordinate, true, find);
  }

  // On the coordinator, before a broadcast with which the call ends: see Call.
  void announce_last() { call_.announce_last(); }

 private:
  // If an interrupt was requested: reports it to the others and throws its reason.
  void end_if_interrupted();
  struct RoundResult {
    std::optional<Error> error;
    Bytes answer;
  };
  Bytes run(std::string_view phase, const LocalStep& local, const CoordinatorStep& coordinate,
            bool last, const FindAnswer& find);
  RoundResult local_outcome(const LocalStep& local, Deadline deadline);
  std::optional<Error> gather(std::string_view phase, const RoundResult& mine, Deadline deadline,
                              std::vector<Bytes>& payloads);
  RoundResult decide(const CoordinatorStep& coordinate, std::optional<Error> failure,
                     std::vector<Bytes> payloads, std::vector<Bytes>& messages);
  void send_outcome(std::string_view phase, std::vector<Bytes> messages, const RoundResult& own,
                    bool last);
  RoundResult receive_outcome(std::string_view phase, const std::optional<Error>& unsent, bool last,
                              const FindAnswer& find);

  bool interrupted() const;
  // An operation between two rounds. If this rank leaves it because of an exception of its caller
  // (a signal handler's), its operations no longer match those of the others: it ends the call.
  template <typename Operation>
  auto in_step(const Operation& operation) -> std::invoke_result_t<Operation> {
    try {
      return operation();
    } catch (const Error& error) {
      if (error.cause()) end_call();
      throw;
    }
  }
  // In a catch block: reports to the others that this rank leaves the call because of the current
  // exception, and rethrows it.
  [[noreturn]] void end_call();

  Communicator comm_;
  std::string work_;
  Deadline deadline_;
  Call call_;
  std::optional<Error> undelivered_;
};

}  // namespace tilestone::engine
