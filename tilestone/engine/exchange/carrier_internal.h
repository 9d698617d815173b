// How what owners read comes to those who asked for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tilestone/engine/exchange/exchange_asker_internal.h"
#include "tilestone/engine/exchange/exchange_owner_internal.h"
#include "tilestone/engine/exchange/exchange_wire_internal.h"
#include "tilestone/engine/read/payloads_internal.h"

namespace tilestone::engine {

// One rank's part in the rounds, which begin when the verdicts are known.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // Reads one round of what this rank owns, and returns its messages, one for each rank. After the
  // last round: of an empty one.
  virtual std::vector<Bytes> next_round() = 0;
  // round[r] came from rank r.
  virtual void take(const std::vector<RoundMessage>& round) = 0;
  // After the rounds: the chunks that this rank has found damaged, of which there are copies.
  // Error(kCorrupt) where there is none of one.
  virtual std::vector<ChunkRef> damaged() { return {}; }
  // Those that any rank has found.
  virtual void take_damaged(const std::vector<ChunkRef>&) {}
  // After the rounds: what this rank is still to read. Error(kInternal) when an owner kept
  // something back, Error(kCorrupt) when a checked chunk is damaged.
  virtual std::vector<Transfer> rest() = 0;
};

inline constexpr uint64_t kLeastPair = 64u << 10;  // bytes of a message that are always allowed

// One rank among `world`; all of it outlives the carrier.
struct CarrierParts {
  const StripeOwners& owners;
  TileOwner& owner;
  const Asker& asker;
  int rank = 0;
  int world = 1;
};

// The messages of a round hold the elements. A rank's take at most message_bytes, but never less
// than kLeastPair for each other rank.
std::unique_ptr<Carrier> carry_by_messages(const CarrierParts& parts, uint64_t message_bytes);

// An owner brings what is wanted into the page cache, which all ranks share, and the messages say
// of what it is there.
std::unique_ptr<Carrier> carry_by_page_cache(const CarrierParts& parts);

}  // namespace tilestone::engine
