// Lets the ranks of a group agree on a result between saves and loads: either all ranks get it or
// none does.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"

namespace tilestone {

// The coordinator's answer to the messages of one round.
struct Decision {
  Bytes answer;
  bool last = true;  // true: the answer is the result; false: another round follows
};

// Returns this rank's message for round 0, 1, ... `answer` is the answer of the previous round,
// empty in round 0.
using SayFn = std::function<Bytes(int round, const Bytes& answer)>;
// Runs only on the coordinator (rank 0). said[r] is the message of rank r.
using DecideFn = std::function<Decision(int round, std::vector<Bytes> said)>;

// Runs rounds until the coordinator returns its last answer, and returns that answer on every rank.
// Every rank must call this with the same `work` ("distribution of a save"), which error messages
// contain.
//
// If either function throws on any rank, every rank throws that error with the number of that rank,
// as in a save (save.h). Work that can fail on a single rank therefore belongs in `say`. If a
// rank does not arrive before `deadline` or is lost, throws Error(kTimeout) or Error(kRankFailed)
// that names it.
Bytes agree(const Communicator& comm, const std::string& work, Deadline deadline, const SayFn& say,
            const DecideFn& decide);

}  // namespace tilestone
