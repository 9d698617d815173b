// Two-phase reading: what several ranks want of a chunk is read by one of them and sent to the
// others.
//
// Steps, all of them an all_to_all, which every rank makes whatever happens to it:
//  1. requests: each rank cuts what it wants into tiles and asks each tile's owner;
//  2. verdicts: an owner weighs what all ranks want of a tile (plan/exchange_plan.h) and says which
//     requests it will serve;
//  3. rounds, until no owner has more: an owner reads as much as one round's messages may hold,
//     packs it for those who asked, and the messages are exchanged and delivered.
// What is declined is read by the rank that wants it, afterwards.
//
// A rank that fails sends its error in the place of its next message to every rank, so that all see
// it in the same step and throw the same. A rank that fails after the last round throws by itself:
// the round of agreement in which all this happens tells the others.
//
// Memory: messages on their way out and in take at most an eighth of LoadOptions::buffer_bytes
// each, but never less than 64 KiB for each pair of ranks; the pool has a half; the rest is for the
// communicator's copies.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/comm/communicator.h"
#include "tilestone/engine/options.h"
#include "tilestone/engine/reader_internal.h"

namespace tilestone::engine {

// Whether ranks that run on these hosts (one of each rank) read in two phases.
bool reads_in_two_phases(LoadOptions::TwoPhase mode, std::span<const std::string> hosts);

// What of buffer_bytes the pool has, and what a rank's messages of one round.
struct MemoryShares {
  uint64_t pool = 0;
  uint64_t messages = 0;
};
MemoryShares memory_shares(uint64_t buffer_bytes, bool two_phases);

// What one rank wants; all of it outlives the exchange.
struct Wanted {
  const ReadContext* context = nullptr;
  std::vector<Transfer> transfers;
  ProgressMeter* progress = nullptr;
};

// Every rank calls. `prepare` runs first; what it throws is told to the others in step 1. Fills
// what is exchanged and returns what is left to read. A chunk whose every byte is read, by
// whatever owners, is checked against its checksum: Error(kCorrupt) with key, file and rank.
std::vector<Transfer> exchange_transfers(const Communicator& comm, Deadline deadline,
                                         uint64_t message_bytes,
                                         const std::function<Wanted()>& prepare);

}  // namespace tilestone::engine
