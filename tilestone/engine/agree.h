// Something that the ranks of a group work out together, between saves and loads, and that all of
// them get or none.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"

namespace tilestone {

// What the coordinator (rank 0) makes of what all ranks have said in a round.
struct Decision {
  Bytes answer;
  bool last = true;  // the answer is the result; else it begins another round
};

// What a rank says in round 0, 1, ...; `answer` is that of the round before, empty in round 0.
using SayFn = std::function<Bytes(int round, const Bytes& answer)>;
// On the coordinator alone: said[r] came from rank r.
using DecideFn = std::function<Decision(int round, std::vector<Bytes> said)>;

// Rounds until the coordinator's answer is the last one; every rank returns that answer. Every rank
// calls, with the same `work` ("distribution of a save"), which stands in messages.
//
// What either function throws on any rank every rank throws, with the number of that rank, as a
// save does (save.h): so what can fail on one rank alone belongs into `say`. Ends by `deadline`
// with Error(kTimeout) or Error(kRankFailed) naming a rank that did not come or was lost.
Bytes agree(const Communicator& comm, const std::string& work, Deadline deadline, const SayFn& say,
            const DecideFn& decide);

}  // namespace tilestone
