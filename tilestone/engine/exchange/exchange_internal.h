// Two-phase reading: one rank reads the parts of a chunk that several ranks want, for all of them.
//
// Each step is one Rounds::exchange, in which every rank takes part, even after a failure.
//  1. Requests: each rank cuts what it wants into tiles and sends requests to each tile's owner.
//  2. Verdicts: an owner compares what all ranks want of a tile (plan/exchange_plan.h) and decides
//     which requests it serves.
//  3. Rounds, until no owner has more. By messages: an owner reads as much as the messages of one
//     round may hold and packs it for the askers; then the messages are exchanged and delivered,
//     while it makes the next round. Where ranks can read one another's memory, the elements stay
//     there. By the page cache, if all ranks share one: an owner brings the parts of a round into
//     the page cache with large reads and tells the askers. An asker reads a transfer itself as
//     soon as everything that is served of it is there, while the owners go on with the next
//     rounds.
//  4. Only if the checkpoint has copies: ranks exchange the chunks that were found damaged or that
//     an owner's disk can't read, and that have a copy. Each rank that was sent a part of such a
//     chunk reads it from a copy itself, whole and checked.
// Afterwards each rank reads what owners declined, which includes chunks in lost files that have
// copies.
//
// If a rank fails in a step, every rank throws its error in that step. A rank that fails after the
// last step only throws, and reports its failure in the load's next round.
//
// Memory: the outgoing messages of a round, and the incoming ones, take at most an eighth of
// LoadOptions::buffer_bytes each, but 64 KiB are always allowed for each pair of ranks. There are
// outgoing ones of two rounds, or three in shared memory. The pool takes half; the rest is for the
// communicator's copies.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run/rounds_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Whether each rank reads only for itself, or how a rank brings what it reads to the others.
// kSharedMemory: by messages, whose elements are in memory that they share, where they can.
enum class ReadFor : uint8_t { kOneself, kMessages, kSharedMemory, kPageCache };

// How the ranks of a load read. hosts[r] is the host of rank r.
ReadFor reading_of_ranks(Reading::TwoPhase mode, std::span<const std::string> hosts,
                         const StorageFacts& storage);

// The pool's share of buffer_bytes.
uint64_t pool_share(uint64_t buffer_bytes, ReadFor way);

// What one rank wants. Everything referred to must outlive the exchange.
struct Wanted {
  const ReadContext* context = nullptr;
  std::vector<Transfer> transfers;
  ProgressMeter* progress = nullptr;
  // The owner of each file, for StripeOwners; equal on all ranks. Empty: stripes are dealt to all
  // ranks.
  std::vector<int> file_owners = {};
};

// Every rank must call this. A rank that failed to determine what it wants passes its error, which
// all ranks then throw. Fills the targets of what is exchanged, and returns the transfers that this
// rank must still read: all of them with kOneself. By messages, a chunk of which owners read every
// byte is checked against its checksum: Error(kCorrupt) with key, file and rank. By the page cache,
// only chunks that one rank wants whole are checked.
std::vector<Transfer> exchange_transfers(Rounds& rounds, ReadFor way, Deadline deadline,
                                         uint64_t buffer_bytes, std::variant<Wanted, Error> wanted);

}  // namespace tilestone::engine
