// One rank's part in two-phase reading as an owner of tiles: it learns what the ranks want, decides
// what it reads for them, and in which rounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tilestone/engine/exchange/exchange_wire_internal.h"
#include "tilestone/engine/read/context_internal.h"
#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/plan/exchange_plan.h"

namespace tilestone::engine {

// A tile that is read for others.
struct ServedTile {
  struct Asked {
    size_t rank = 0;
    uint32_t request = 0;
    Box box;
  };
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  Tile tile;
  std::vector<Asked> asked;
  StoredPayload payload;
};

// What an owner reads in one round.
struct TileRound {
  // Elements for a rank.
  struct Packed {
    size_t rank = 0;
    SentBox sent;
    uint64_t at = 0;  // among the rank's elements of the round, bytes
  };
  // A part that is read: packed[first, first + count) are made of it.
  struct Loaded {
    size_t tile = 0;
    Part part;
    size_t first = 0;
    size_t count = 0;
    bool last = false;  // of its tile
  };
  std::vector<Loaded> parts;
  std::vector<Packed> packed;
  std::vector<uint64_t> filled;  // bytes, by rank
};

class TileOwner {
 public:
  // Both outlive the owner.
  TileOwner(const ReadContext& context, const StripeOwners& owners, int world);

  // requests[r]: what rank r asks for. Returns the verdicts, one message for each rank. Declined is
  // also what lies elsewhere too and can't be read here: lost files, headers that can't be read.
  std::vector<Bytes> decide(const std::vector<Bytes>& requests);
  bool more() const { return next_ < served_.size(); }
  // The next parts of which at most pair_bytes are for one rank (but one part at least), in the
  // order of their places. They become the batch of `reader`, which is empty; of tiles that are
  // read whole and can be checked, checksums are wanted.
  TileRound plan_round(uint64_t pair_bytes, RangeReader& reader);
  const ServedTile& tile(size_t index) const { return served_[index]; }

 private:
  using Verdicts = std::vector<std::vector<bool>>;  // by rank and request

  const StoredTensor& tensor_of(const ServedTile& served) const;
  const StoredChunk& chunk_of(const ServedTile& served) const;
  void group(const std::vector<Bytes>& requests, Verdicts& verdicts);
  void judge(std::vector<ServedTile>& tiles, Verdicts& verdicts);
  void find_places(Verdicts& verdicts);
  void cut_next(uint64_t pair_bytes);
  bool schedule(TileRound& round, const Part& part, uint64_t pair_bytes, RangeReader& reader);

  const ReadContext& context_;
  const StripeOwners& owners_;
  const size_t world_;
  std::vector<ServedTile> served_;  // by place on disk
  size_t next_ = 0;                 // of served_
  std::vector<Part> parts_;         // of served_[next_], cut when it is reached
  size_t next_part_ = 0;
  bool checked_ = false;  // whether served_[next_] is read whole and in its record's order
};

}  // namespace tilestone::engine
