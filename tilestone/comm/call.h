// Call: a piece of work that all ranks of a group make together, such as one save or one load.
//
// Ranks may disagree about what comes next: one has skipped a call, repeated one, failed before it
// or gave another location. So a call begins with a rendezvous, and only when every rank has come
// to the same call do its operations begin:
//
// 1. Each rank sends the coordinator (rank 0) a hello: a random nonce, the work and the place, the
//    number of its last operation, and the fingerprints of its last calls.
// 2. When all have come to the same call, the coordinator answers each hello by its nonce with the
//    call's number, which is larger than that of any operation or call of any rank; the call's
//    operations are numbered on from it. So messages of one call are never taken for those of
//    another.
// 3. Hellos that contradict each other: a rank whose call the others have left already is behind.
//    It gets an error, and the others wait for it to come on. Where nobody can be known to be
//    behind, all ranks get the same Error(kMismatch) once all have come. Ranks that got out of step
//    by one call so are in step again after at most one more that fails.
// 4. A rank that leaves early (deadline, interrupt) withdraws its hello and says why. Those who
//    came to the same call get its error as soon as nobody else is missing.
// 5. A rank that left, and not by its deadline, before the others came may be about to come again.
//    Once nobody else is missing they wait five seconds for that, or until their deadline, and then
//    get an error that names it. The coordinator leaves word for every rank when it goes: who comes
//    to the same call later waits as long, and goes on waiting when the coordinator is back.
//
// Whatever went wrong, the next call that all ranks make works.
//
// One process may use one group from several threads: their calls follow one another.
#pragma once

#include <cstdint>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"

namespace tilestone {

class Call {
 public:
  // Returns when all ranks have come to this call, that is one with the same `work` ("save") and
  // `place` (a location; "" fits every place, for a rank that can't name it and will say why in
  // the call). Throws kMismatch (see above), kTimeout or kRankFailed with the number of a rank that
  // did not come, kInterrupted, the error of the rank that left, or the interrupt's reason;
  // kInvalidArgument inside another call of this thread on this group.
  //
  // On a communicator without a CallPort, and alone, it returns at once.
  Call(Communicator comm, std::string work, std::string place, Deadline deadline);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Every other rank that waits, or will wait, in an operation of this call throws `why`, with this
  // rank's number where it has none. For a rank that leaves the call before its end. Takes about a
  // second at most, and never throws: what fails is logged.
  void abort(const Error& why) noexcept;

 private:
  void take_turn(Deadline deadline);
  void end_turn();

  Communicator comm_;
  CallPort* port_;  // null: nothing to agree on
};

}  // namespace tilestone
