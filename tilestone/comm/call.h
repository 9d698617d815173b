// Call: a task that all ranks of a group do together, such as one save or one load.
//
// Ranks may disagree about which call comes next: one may have skipped a call, repeated one, failed
// before it or passed another location. So every call begins with a rendezvous. Its operations
// begin only when all ranks have arrived at the same call:
//
// 1. Each rank sends the coordinator (rank 0) a hello: a random nonce, the work and the location,
//    and the number of its last operation.
// 2. When all ranks have arrived at the same call, the coordinator answers each hello. The answer
//    has the nonce of the hello and the call's number, which is larger than the number of any
//    operation or call of any rank. The call's operations continue from that number, so a message
//    of one call is never mistaken for a message of another.
// 3. If hellos contradict each other when all have arrived, all ranks get the same
//    Error(kMismatch), which says which rank is in which call. They are in step again at the next
//    call that all make.
// 4. A rank that leaves early (deadline, interrupt) withdraws its hello and sends its error. When
//    no other rank is missing, the ranks at the same call get that error. It looks for an answer
//    after it has withdrawn, as the coordinator looks for withdrawals after it has answered: one of
//    them sees the other's message, and ends the call.
// 5. A rank may leave, for another reason than its deadline, before the others have arrived. It may
//    be about to arrive again. When no other rank is missing, the others wait for it for five
//    seconds, or until their deadline, and then get an error that names it. A coordinator that
//    leaves sends its error to every rank. A rank that arrives at the same call later also waits
//    five seconds, and keeps waiting if the coordinator comes back.
//
// Whatever went wrong, the next call that all ranks make works, once no hello or withdrawal of an
// earlier call is on its way. One that comes late, as behind a link that was cut, counts for the
// call at the same place that has begun meanwhile: that fails on all ranks, with the error of the
// rank that left, or, if it began without that rank, when the rank looks for its next answer, and
// at the deadline at the latest. One of another place is a contradiction.
//
// Several threads of a process may use one group. Their calls run one after the other.
#pragma once

#include <cstdint>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"

namespace tilestone {

class Call {
 public:
  // Returns when all ranks have arrived at this call: a call with the same `work` ("save") and the
  // same `location`. The location "" matches every location; it is for a rank that can't name
  // the location and will report why inside the call. Throws kMismatch (see above), kTimeout or
  // kRankFailed with the number of a rank that did not arrive, kInterrupted, the error of a rank
  // that left, or the interrupt's reason. Throws kInvalidArgument if this thread is inside another
  // call on this group.
  //
  // Returns at once if the group has one rank or the communicator has no CallPort.
  Call(Communicator comm, std::string work, std::string location, Deadline deadline);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // For a rank that leaves the call before its end. Every other rank that waits, or will wait, in
  // an operation of this call throws `why`, with this rank's number if `why` names no rank. Takes
  // about one second at most. Never throws: failures are logged.
  void abort(const Error& why) noexcept;

  // Rank 0 calls this before the scatter or broadcast with which the call ends. Its process may end
  // as soon as that operation has returned: the others have the message by then, unless one of them
  // took none for several seconds.
  void announce_last();

 private:
  void take_turn(Deadline deadline);
  void end_turn();

  Communicator comm_;
  CallPort* port_;  // null: the ranks need not, or can't, agree on calls
};

}  // namespace tilestone
