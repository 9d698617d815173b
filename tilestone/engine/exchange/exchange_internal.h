// Two-phase reading: what several ranks want of a chunk is read by one of them for all.
//
// Steps, all of them an all_to_all, which every rank makes whatever happens to it:
//  1. requests: each rank cuts what it wants into tiles and asks each tile's owner;
//  2. verdicts: an owner weighs what all ranks want of a tile (plan/exchange_plan.h) and says which
//     requests it will serve;
//  3. rounds, until no owner has more. By messages: an owner reads as much as one round's messages
//     may hold, packs it for those who asked, and the messages are exchanged and delivered. By the
//     page cache, where all ranks share one: an owner brings a round's parts into it in large
//     reads, and reports it to those who asked, who read a transfer themselves when all that is
//     served of it is there, while the owners go on with the next round.
//  4. in checkpoints that have copies: the chunks that were damaged on the way, of which there is a
//     copy, and those that an owner's disk can't read. All who were given some of one read it from
//     a copy themselves, whole and checked.
// What is declined is read by the rank that wants it, afterwards: also what lies in a lost file of
// which there are copies.
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
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

// How what one rank reads comes to the others.
enum class ReadFor : uint8_t { kOneself, kMessages, kPageCache };

// How ranks that run on these hosts (one of each rank) read; shared_cache: the storage has
// kSharedCache.
ReadFor reading_of_ranks(LoadOptions::TwoPhase mode, std::span<const std::string> hosts,
                         bool shared_cache);

// What of buffer_bytes the pool has.
uint64_t pool_share(uint64_t buffer_bytes, ReadFor way);

// What one rank wants; all of it outlives the exchange.
struct Wanted {
  const ReadContext* context = nullptr;
  std::vector<Transfer> transfers;
  ProgressMeter* progress = nullptr;
  // Of the files, for StripeOwners: the same on all ranks. Empty: stripes are dealt to all.
  std::vector<int> file_owners = {};
};

// Every rank calls, also one that could not find out what it wants: with what it failed with, which
// all ranks then throw. Fills what is exchanged and returns what is left to read, with kOneself
// everything. A chunk whose every byte is read, by whatever owners, is checked against its
// checksum: Error(kCorrupt) with key, file and rank; by the page cache, only what one rank wants
// whole.
std::vector<Transfer> exchange_transfers(const Communicator& comm, ReadFor way, Deadline deadline,
                                         uint64_t buffer_bytes, std::variant<Wanted, Error> wanted);

}  // namespace tilestone::engine
