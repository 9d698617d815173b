// Carriers bring the elements that owners read to the ranks that asked for them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tilestone/base/shared_memory.h"
#include "tilestone/engine/exchange/exchange_asker_internal.h"
#include "tilestone/engine/exchange/exchange_owner_internal.h"
#include "tilestone/engine/exchange/exchange_wire_internal.h"
#include "tilestone/engine/read/payloads_internal.h"

namespace tilestone::engine {

// One rank's part in the rounds. They begin when the verdicts are known.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // Reads this rank's tiles of the next round, and returns one message for each rank. After the
  // last round: the messages of an empty round. Called on a thread of its own, while rounds before
  // are accepted.
  virtual std::vector<Bytes> next_round() = 0;
  // Accepts the messages of a round; round[r] is from rank r.
  virtual void accept(const std::vector<RoundMessage>& round) = 0;
  // After the rounds: the chunks that this rank has found damaged. All of them have copies;
  // Error(kCorrupt) if a damaged chunk has none.
  virtual std::vector<ChunkRef> damaged() { return {}; }
  // Takes the damaged chunks that all ranks have found.
  virtual void note_damaged(const std::vector<ChunkRef>&) {}
  // After the rounds: what this rank must still read itself. Error(kInternal) if an owner has not
  // sent everything that it promised, Error(kCorrupt) if a checked chunk is damaged.
  virtual std::vector<Transfer> rest() = 0;
};

// Memory in which ranks of one host leave the elements of rounds for one another.
//
// A part of it is used for one round, and again kParts rounds later. That is safe: a rank makes
// round k + 1 once round k was taken to be sent. By then it has all messages of round k - 1, which
// the others have sent after they had accepted round k - 2.
struct HostMemory {
  static constexpr size_t kMostAhead = 1;  // rounds that are made before they are taken
  static constexpr size_t kParts = 3;

  void make(uint64_t part_bytes) { own = SharedMemory::make(kParts * part_bytes); }

  std::unique_ptr<SharedMemory> own;                  // null: none is used
  std::vector<bool> readers;                          // by rank: whether it reads this one's
  std::vector<std::unique_ptr<SharedMemory>> others;  // by rank; null: can't be read
};

// The message size limit for a pair of ranks is never below this, bytes.
inline constexpr uint64_t kLeastPair = 64u << 10;

// Rank `rank` among `world` ranks. Everything referred to must outlive the carrier.
struct CarrierParts {
  const StripeOwners& owners;
  TileOwner& owner;
  const Asker& asker;
  int rank = 0;
  int world = 1;
};

// The messages of a round contain the elements, or say where these are in the sender's memory, if
// the receiver reads that. Those that one rank sends in a round have at most message_bytes bytes in
// all, but kLeastPair bytes are always allowed for each rank. `memory` must outlive the carrier.
std::unique_ptr<Carrier> carry_by_messages(const CarrierParts& parts, uint64_t message_bytes,
                                           const HostMemory& memory);

// Owners read tiles into the page cache, which all ranks share. The messages only say which boxes
// are there now.
std::unique_ptr<Carrier> carry_by_page_cache(const CarrierParts& parts);

}  // namespace tilestone::engine
