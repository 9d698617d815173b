#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/exchange/carrier_internal.h"
#include "tilestone/engine/read/deliver_internal.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kBoxDescription = 48;  // approximate size of an encoded box, bytes
constexpr uint64_t kAlignment = 64;     // of the elements for a rank in shared memory, bytes

class ByMessages final : public Carrier {
 public:
  ByMessages(const CarrierParts& parts, uint64_t message_bytes, const HostMemory& memory)
      : owners_(parts.owners),
        owner_(parts.owner),
        asker_(parts.asker),
        context_(*asker_.wanted().context),
        rank_(static_cast<size_t>(parts.rank)),
        world_(static_cast<size_t>(parts.world)),
        pair_bytes_(std::max(message_bytes / world_, kLeastPair)),
        memory_(memory),
        reader_(context_, &context_.threads) {}

  std::vector<Bytes> next_round() override {
    const TileRound round = owner_.plan_round(pair_bytes_);
    for (const TileRound::Loaded& loaded : round.parts) reader_.add(owner_.range_of(loaded));
    std::vector<RoundMessage> messages(world_);
    for (const TileRound::Packed& packed : round.packed) {
      if (packed.rank != rank_) messages[packed.rank].boxes.push_back(packed.sent);
    }
    std::vector<Bytes> bodies(world_);
    const std::vector<std::byte*> places = places_of(round, messages, bodies);
    RangeReader::Unread unread;
    if (!context_.metadata.copies.empty()) {
      unread = [&](size_t i, const Error& error) { skip_unreadable(round, round.parts[i], error); };
    }
    const std::vector<ByteRange> ranges = reader_.read(
        [&](size_t i, ByteView bytes) { pack(round, round.parts[i], bytes, places); }, unread);
    owner_.check_blocks(round, ranges);
    add_checks(round, ranges, messages);
    std::vector<Bytes> out;
    for (size_t rank = 0; rank < world_; ++rank) {
      out.push_back(encode_round(std::move(bodies[rank]), messages[rank], owner_.more()));
    }
    return out;
  }

  void accept(const std::vector<RoundMessage>& round) override {
    std::vector<Arrival> arrivals;
    for (size_t from = 0; from < round.size(); ++from) {
      keep_checks(round[from].checks);
      find_arrivals(static_cast<int>(from), round[from], arrivals);
    }
    context_.threads.parallel_for(arrivals.size(), [&](size_t i) {
      const Arrival& arrival = arrivals[i];
      StoredPayload packed;
      packed.dtype = context_.metadata.tensors[arrival.asked->request.tensor].dtype;
      packed.shape = arrival.sent->box.shape;
      packed.strides = contiguous_strides(packed.shape);
      put(*arrival.asked, packed, {arrival.sent->box, 0, arrival.bytes.size()}, arrival.bytes);
    });
  }

  std::vector<ChunkRef> damaged() override {
    std::vector<ChunkRef> damaged;
    for (const auto& [tensor, chunk] : owner_.given_up()) damaged.push_back({tensor, chunk});
    for (const auto& [read, record] : records_) {
      const ChunkRef chunk{read.first, read.second};
      if (record.sum.size() != record.size) {
        log_unchecked_parts(context_, chunk);
        continue;
      }
      try {
        expect_record(context_, chunk, record.size, record.crc32, record.sum.crc32());
      } catch (const Error& error) {
        if (context_.metadata.copies_of(chunk.tensor, chunk.chunk).empty()) throw;
        warn_of_damage(error, context_, chunk);
        damaged.push_back(chunk);
      }
    }
    records_.clear();
    return damaged;
  }

  void note_damaged(const std::vector<ChunkRef>& chunks) override {
    for (const ChunkRef& chunk : chunks) damaged_.emplace(chunk.tensor, chunk.chunk);
  }

  std::vector<Transfer> rest() override {
    damaged();  // checks the records; without copies it was not called before
    asker_.expect_all(delivered_);
    return asker_.rest(damaged_, true);
  }

 private:
  struct Arrival {
    const Asker::AskedTransfer* asked;
    const SentBox* sent;
    ByteView bytes;
  };
  // The record of a chunk that the owners together may have read whole.
  struct Record {
    uint64_t size = 0;   // bytes
    uint32_t crc32 = 0;  // as recorded
    RecordSum sum;
  };

  // Where the elements for each rank go: into this rank's memory, or into the body of a message.
  std::vector<std::byte*> places_of(const TileRound& round, std::vector<RoundMessage>& messages,
                                    std::vector<Bytes>& bodies) {
    MutableByteView left = memory_.own != nullptr ? memory_.own->bytes() : MutableByteView();
    const size_t part = left.size() / HostMemory::kParts;
    left = left.subspan(number_++ % HostMemory::kParts * part, part);
    std::vector<std::byte*> places(world_);
    for (size_t rank = 0; rank < world_; ++rank) {
      const uint64_t size = round.filled[rank];
      if (rank == rank_ || size == 0) continue;
      if (memory_.readers[rank] && size <= left.size()) {
        places[rank] = left.data();
        messages[rank].shared_at = static_cast<uint64_t>(left.data() - memory_.own->bytes().data());
        messages[rank].shared_bytes = size;
        left = left.subspan(std::min<size_t>(align_up(size, kAlignment), left.size()));
        continue;
      }
      bodies[rank].reserve(size + (messages[rank].boxes.size() + 2) * kBoxDescription);
      bodies[rank].resize(size);
      places[rank] = bodies[rank].data();
    }
    return places;
  }

  // The elements that a rank has sent.
  ByteView elements_of(size_t from, const RoundMessage& message) const {
    if (message.shared_bytes == 0) return message.elements;
    const SharedMemory* const memory = memory_.others[from].get();
    const ByteView bytes = memory != nullptr ? memory->bytes() : MutableByteView();
    if (message.shared_at > bytes.size() ||
        message.shared_bytes > bytes.size() - message.shared_at) {
      fail_exchange(static_cast<int>(from), "a rank's elements are beyond its memory");
    }
    return bytes.subspan(message.shared_at, message.shared_bytes);
  }

  // Puts the elements that others requested into their places, and those that this rank requested
  // into their targets. Called from any thread.
  void pack(const TileRound& round, const TileRound::Loaded& loaded, ByteView bytes,
            const std::vector<std::byte*>& places) {
    const ServedTile& tile = owner_.tile(loaded.tile);
    for (size_t i = loaded.first; i < loaded.first + loaded.count; ++i) {
      const TileRound::Packed& packed = round.packed[i];
      const Box& box = packed.sent.box;
      if (packed.rank == rank_) {
        put(asker_.find(static_cast<int>(rank_), packed.sent.request), tile.payload, loaded.part,
            bytes);
        continue;
      }
      std::byte* to = places[packed.rank] + packed.at;
      deliver(
          tile.payload, loaded.part, bytes,
          {tile.tensor, tile.chunk, box, TensorView::contiguous(to, tile.payload.dtype, box.shape)},
          *context_.device_writes);
    }
  }

  // Handles a part that the disk can't read. Ranks that requested some of it get zeros, or what an
  // earlier round has left in shared memory, and learn after the rounds (damaged()) that they must
  // read the chunk from a copy.
  void skip_unreadable(const TileRound& round, const TileRound::Loaded& loaded,
                       const Error& error) {
    const ServedTile& tile = owner_.tile(loaded.tile);
    owner_.give_up({tile.tensor, tile.chunk}, error);
    for (size_t i = loaded.first; i < loaded.first + loaded.count; ++i) {
      const TileRound::Packed& packed = round.packed[i];
      if (packed.rank != rank_) continue;
      count(static_cast<uint64_t>(packed.sent.box.numel()), tile.payload.dtype);
    }
  }

  // Adds the CRC-32 of each tile that is complete to the message for the rank that checks its
  // chunk. Parts come in the order of their tiles, and of their bytes within a tile.
  void add_checks(const TileRound& round, const std::vector<ByteRange>& ranges,
                  std::vector<RoundMessage>& messages) {
    for (size_t i = 0; i < ranges.size(); ++i) {
      const TileRound::Loaded& loaded = round.parts[i];
      if (!ranges[i].summed || owner_.tile(loaded.tile).blocks) continue;
      sum_.add(sum_.size(), ranges[i].size, ranges[i].crc32);
      if (!loaded.last) continue;
      const ServedTile& tile = owner_.tile(loaded.tile);
      const StoredTensor& tensor = context_.metadata.tensors[tile.tensor];
      const StoredChunk& chunk = tensor.chunks[tile.chunk];
      const int checker = owners_.owner(chunk.at.file, chunk.at.offset);  // the first tile's owner
      const RecordSum sum = std::exchange(sum_, {});
      if (owner_.given_up().contains({tile.tensor, tile.chunk})) continue;
      messages[static_cast<size_t>(checker)].checks.push_back(
          {tile.tensor, tensor.first_of_item(tile.chunk),
           begin_in_item(chunk, tile.payload.dtype) + tile.tile.offset, sum.size(), sum.crc32(),
           tile.payload.record_size, *tile.payload.record_crc32});
    }
  }

  void keep_checks(const std::vector<TileCheck>& checks) {
    for (const TileCheck& check : checks) {
      Record& record = records_[{check.tensor, check.chunk}];
      record.size = check.record_size;
      record.crc32 = check.record_crc32;
      record.sum.add(check.offset, check.size, check.crc);
    }
  }

  void find_arrivals(int owner, const RoundMessage& message, std::vector<Arrival>& arrivals) {
    ByteView left = elements_of(static_cast<size_t>(owner), message);
    for (const SentBox& sent : message.boxes) {
      const Asker::AskedTransfer& asked = asker_.find(owner, sent.request);
      const Box& box = asked.request.box;
      if (sent.box.rank() != box.rank() || !box.contains(sent.box)) {
        fail_exchange(owner, "a rank sent elements beyond the requested box");
      }
      const uint64_t size = static_cast<uint64_t>(sent.box.numel()) *
                            itemsize(context_.metadata.tensors[asked.request.tensor].dtype);
      if (size > left.size()) fail_exchange(owner, "the message of a rank is too short");
      arrivals.push_back({&asked, &sent, left.first(size)});
      left = left.subspan(size);
    }
    if (!left.empty()) fail_exchange(owner, "the message of a rank is too long");
  }

  // Writes the elements of a request that are in `part` to their target. Called from any thread.
  void put(const Asker::AskedTransfer& asked, const StoredPayload& payload, const Part& part,
           ByteView bytes) {
    const auto common = intersect(part.box, asked.request.box);
    if (!common) return;
    deliver(payload, part, bytes, asker_.cut_out(asked), *context_.device_writes);
    count(static_cast<uint64_t>(common->numel()), payload.dtype);
  }

  void count(uint64_t elements, DType stored) {
    delivered_ += elements;
    asker_.wanted().progress->add(elements * itemsize(stored));
  }

  const StripeOwners& owners_;
  TileOwner& owner_;
  const Asker& asker_;
  const ReadContext& context_;
  const size_t rank_;
  const size_t world_;
  const uint64_t pair_bytes_;  // limit on the elements of one message, bytes
  const HostMemory& memory_;
  uint64_t number_ = 0;  // of rounds
  RangeReader reader_;
  RecordSum sum_;  // of the checked tile that is being read, so far
  std::map<std::pair<uint32_t, uint32_t>, Record> records_;  // by tensor and chunk
  Asker::Chunks damaged_;
  std::atomic<uint64_t> delivered_ = 0;  // elements
};

}  // namespace

std::unique_ptr<Carrier> carry_by_messages(const CarrierParts& parts, uint64_t message_bytes,
                                           const HostMemory& memory) {
  return std::make_unique<ByMessages>(parts, message_bytes, memory);
}

}  // namespace tilestone::engine
