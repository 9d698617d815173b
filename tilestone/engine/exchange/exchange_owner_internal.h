// One rank's part in two-phase reading as an owner of tiles: it learns what the ranks want, reads
// it in rounds, packs it for them, and sees to the checksums of chunks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "tilestone/engine/exchange/exchange_internal.h"
#include "tilestone/engine/exchange/exchange_wire_internal.h"
#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/plan/exchange_plan.h"

namespace tilestone::engine {

class TileOwner {
 public:
  // What this rank asked itself for goes to `own` (any thread) instead of a message: the request,
  // where the elements of its box are, and the bytes of a part that holds some of them.
  using OwnPut = std::function<void(uint32_t request, const StoredPayload& payload,
                                    const Part& part, ByteView bytes)>;

  TileOwner(const ReadContext& context, const StripeOwners& owners, int rank, int world,
            ReadFor way, uint64_t message_bytes, OwnPut own);

  // requests[r]: what rank r asks for. Returns the verdicts, one message for each rank.
  std::vector<Bytes> decide(const std::vector<Bytes>& requests);
  bool more() const { return next_ < served_.size(); }
  // Reads one round, or brings it into the page cache, and returns its messages, one for each rank.
  // By the page cache any thread may call, if no other is in a call.
  std::vector<Bytes> next_round();

  void take_checks(std::span<const TileCheck> checks);
  // After the rounds. Error(kCorrupt), naming key and file, when a chunk that was read whole is
  // not what its checksum says.
  void verify() const;

 private:
  struct Asked {
    int rank = 0;
    uint32_t request = 0;
    Box box;
  };
  // A tile that is read for others.
  struct Served {
    uint32_t tensor = 0;
    uint32_t chunk = 0;
    Tile tile;
    std::vector<Asked> asked;
    StoredPayload payload;
    bool checked = false;
  };
  struct Packed {
    int rank = 0;
    Slot slot;
    uint64_t at = 0;  // in the rank's message, bytes
  };
  // A part that is read in this round: packed[first, first + count) are made of it.
  struct Loaded {
    size_t served = 0;
    Part part;
    size_t first = 0;
    size_t count = 0;
    bool last = false;  // of its tile
  };
  // What is known of a chunk that all ranks together may have read whole.
  struct Record {
    uint64_t size = 0;   // bytes
    uint32_t crc32 = 0;  // as recorded
    RecordSum sum;
  };
  struct Round;
  using Verdicts = std::vector<std::vector<bool>>;  // by rank and request

  const StoredTensor& tensor_of(const Served& served) const;
  const StoredChunk& chunk_of(const Served& served) const;
  void group(const std::vector<Bytes>& requests, Verdicts& verdicts);
  void judge(std::vector<Served>& tiles, Verdicts& verdicts);
  void find_places();
  void cut_next();
  bool schedule(Round& round, const Part& part);
  Round plan_round();
  std::vector<Bytes> read_round();
  std::vector<Bytes> cache_round();
  void take(Round& round, const Loaded& loaded, ByteView bytes);
  void add_checks(const Round& round, const std::vector<ByteRange>& ranges,
                  std::vector<RoundMessage>& messages);

  const ReadContext& context_;
  const StripeOwners& owners_;
  const int rank_;
  const size_t world_;
  const ReadFor way_;
  const uint64_t pair_bytes_;  // of one message
  const uint64_t part_bytes_;
  const OwnPut own_;
  std::vector<Served> served_;  // by place on disk
  size_t next_ = 0;             // of served_
  std::vector<Part> parts_;     // of served_[next_], cut when it is reached
  size_t next_part_ = 0;
  RangeReader reader_;  // its batch: the parts of the round that is planned
  RecordSum sum_;       // of the checked tile that is being read, so far
  std::map<std::pair<uint32_t, uint32_t>, Record> records_;  // by tensor and chunk
};

}  // namespace tilestone::engine
