#include "tilestone/engine/agree.h"

#include <utility>

#include "tilestone/engine/run/rounds_internal.h"

namespace tilestone {

Bytes agree(const Communicator& comm, const std::string& work, Deadline deadline, const SayFn& say,
            const DecideFn& decide) {
  engine::Rounds rounds(comm, work, "", deadline);
  Bytes answer;
  for (int round = 0;; ++round) {
    Bytes decided;
    const auto local = [&](Deadline) { return say(round, answer); };
    // The scattered answer says only whether another round follows. The decision itself may be long
    // and is equal for all ranks, so it is broadcast.
    const auto coordinate = [&](std::vector<Bytes> said) {
      Decision decision = decide(round, std::move(said));
      decided = std::move(decision.answer);
      const Bytes last(1, decision.last ? std::byte{1} : std::byte{0});
      return std::vector<Bytes>(static_cast<size_t>(comm.size()), last);
    };
    const Bytes last = rounds.run("round " + std::to_string(round), local, coordinate);
    if (comm.is_coordinator() && last.at(0) != std::byte{0}) rounds.announce_last();
    answer = rounds.broadcast(decided, deadline);
    if (last.at(0) != std::byte{0}) return answer;
  }
}

}  // namespace tilestone
