// The owner: one rank's part in two-phase reading as an owner of tiles. It gets the requests of all
// ranks, decides what it reads for them, and plans the rounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "tilestone/engine/exchange/exchange_wire_internal.h"
#include "tilestone/engine/read/context_internal.h"
#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/plan/exchange_plan.h"
#include "tilestone/state/chunk_blocks.h"

namespace tilestone::engine {

// A tile that is read for others.
struct ServedTile {
  struct AskedBox {
    size_t rank = 0;
    uint32_t request = 0;
    Box box;
    bool checked_by_asker = false;
  };
  uint32_t tensor = 0;
  uint32_t chunk = 0;
  Tile tile;
  std::vector<AskedBox> asked;
  StoredPayload payload;
  // If its chunk has blocks. The tile is then whole blocks from tile.offset on, and not a box.
  std::optional<ChunkBlocks> blocks;
};

// What an owner reads in one round.
struct TileRound {
  // A box of elements for one rank.
  struct Packed {
    size_t rank = 0;
    SentBox sent;
    uint64_t at = 0;  // offset in the rank's elements of this round, bytes
  };
  // A part that is read. Its elements go to packed[first, first + count).
  struct Loaded {
    size_t tile = 0;  // for TileOwner::tile()
    Part part;
    size_t first = 0;
    size_t count = 0;
    bool last = false;     // the last part of its tile
    bool checked = false;  // whether its checksum is needed
  };
  std::vector<Loaded> parts;
  std::vector<Packed> packed;
  std::vector<uint64_t> filled;  // bytes of elements, by rank
  std::set<uint32_t> files;      // of the parts
};

class TileOwner {
 public:
  // `context` and `owners` must outlive this object.
  TileOwner(const ReadContext& context, const StripeOwners& owners, int world);

  // requests[r]: the message of rank r. Returns the verdicts, one message for each rank. Also
  // declines chunks that have copies and whose own file is lost or whose header can't be read.
  std::vector<Bytes> decide(const std::vector<Bytes>& requests);
  bool more() const { return next_ < served_.size(); }
  // Plans the next parts, in the order on disk: at most pair_bytes for each rank, but at
  // least one part, and at most as many as a batch of a RangeReader takes. With verify_checksums,
  // tiles with blocks are read by whole blocks, and checksums are wanted of what can be checked,
  // of blocks only if a rank wants some that does not check them itself.
  TileRound plan_round(uint64_t pair_bytes);
  const ServedTile& tile(size_t index) const { return served_[index]; }
  // The bytes of a part of a round.
  ByteRange range_of(const TileRound::Loaded& loaded) const;

  // Checks the blocks of a round. ranges[i]: round.parts[i] as read; others than those of tiles
  // with blocks are ignored. Rounds must be passed in order. A damaged block of a chunk that has
  // copies is noted in given_up(), else Error(kCorrupt).
  void check_blocks(const TileRound& round, std::span<const ByteRange> ranges);
  // Notes, with a warning, that a chunk must be read from another place. Throws the error if it has
  // no copies.
  void give_up(ChunkRef chunk, const Error& error);
  const std::set<std::pair<uint32_t, uint32_t>>& given_up() const { return given_up_; }

 private:
  using Verdicts = std::vector<std::vector<bool>>;  // by rank and request
  struct CutPart {
    Part part;
    bool checked = false;  // whether its checksum is needed
  };

  const StoredTensor& tensor_of(const ServedTile& served) const;
  const StoredChunk& chunk_of(const ServedTile& served) const;
  void group(const std::vector<Bytes>& requests, Verdicts& verdicts);
  void judge(std::vector<ServedTile>& tiles, Verdicts& verdicts);
  void find_payloads_of_chunks(Verdicts& verdicts);
  bool is_worth_it(const ServedTile& tile, uint64_t request_bytes) const;
  void cut_next(uint64_t pair_bytes);
  void cut_blocks(const ServedTile& served, uint64_t part_bytes);
  bool schedule(TileRound& round, const CutPart& cut, uint64_t pair_bytes);

  const ReadContext& context_;
  const StripeOwners& owners_;
  const size_t world_;
  std::vector<ServedTile> served_;                    // by place on disk
  size_t next_ = 0;                                   // index into served_
  std::vector<CutPart> parts_;                        // of served_[next_]; empty until it is cut
  size_t next_part_ = 0;                              // index into parts_
  uint32_t block_sum_ = 0;                            // of the block that is being checked, so far
  std::set<std::pair<uint32_t, uint32_t>> given_up_;  // tensor and chunk
};

}  // namespace tilestone::engine
