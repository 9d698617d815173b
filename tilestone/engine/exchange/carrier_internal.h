// Carriers bring the elements that owners read to the ranks that asked for them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

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
  // last round: the messages of an empty round.
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

// The messages of a round contain the elements. Those that one rank sends in a round have at most
// message_bytes bytes in all, but kLeastPair bytes are always allowed for each rank.
std::unique_ptr<Carrier> carry_by_messages(const CarrierParts& parts, uint64_t message_bytes);

// Owners read tiles into the page cache, which all ranks share. The messages only say which boxes
// are there now.
std::unique_ptr<Carrier> carry_by_page_cache(const CarrierParts& parts);

}  // namespace tilestone::engine
