// While an owner makes a round, the ranks read what earlier rounds have brought into the page
// cache: only what they want, straight into their tensors. A rank reads a transfer when everything
// that is served of it is there.
#include <algorithm>
#include <utility>
#include <vector>

#include "tilestone/engine/exchange/carrier_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kCachedPortion = 32u << 20;  // bytes that an owner prefetches at once
constexpr uint64_t kLeastFetched = 16u << 20;   // bytes from the disk that are enough for a round

class ByPageCache final : public Carrier {
 public:
  explicit ByPageCache(const CarrierParts& parts)
      : owner_(parts.owner),
        asker_(parts.asker),
        world_(static_cast<size_t>(parts.world)),
        reader_(*asker_.wanted().context, nullptr),
        keeping_(keeping(*asker_.wanted().context)),
        checker_(keeping_, nullptr) {}

  // Brings in portions until they are enough. Tiles that are checked are read by
  // their owner; others are only prefetched, and do not count if they are in the page cache
  // already. Uses no thread of the pool, because the pool's threads are busy reading.
  std::vector<Bytes> next_round() override {
    std::vector<RoundMessage> messages(world_);
    const uint64_t pair_bytes = std::max(kCachedPortion / world_, kLeastPair);
    for (uint64_t fetched = 0; owner_.more() && fetched < kLeastFetched;) {
      const TileRound round = owner_.plan_round(pair_bytes);
      for (const TileRound::Loaded& loaded : round.parts) {
        if (!is_checked(loaded)) reader_.add(owner_.range_of(loaded));
      }
      fetched += reader_.prefetch();
      fetched += check(round);
      for (const TileRound::Packed& packed : round.packed) {
        messages[packed.rank].boxes.push_back(packed.sent);
      }
    }
    std::vector<Bytes> out;
    for (const RoundMessage& message : messages) {
      out.push_back(encode_round({}, message, owner_.more()));
    }
    return out;
  }

  void accept(const std::vector<RoundMessage>& round) override {
    if (awaited_.empty()) await();
    std::vector<Transfer> ready;
    for (size_t from = 0; from < round.size(); ++from) {
      const auto owner = static_cast<int>(from);
      for (const SentBox& sent : round[from].boxes) {
        const size_t transfer = asker_.find(owner, sent.request).transfer;
        const auto elements = static_cast<uint64_t>(sent.box.numel());
        uint64_t& awaited = awaited_[transfer];
        if (elements == 0 || elements > awaited) {
          fail_exchange(owner, "a rank reported more elements than were requested");
        }
        awaited -= elements;
        announced_ += elements;
        if (awaited == 0) add_ready(transfer, ready);
      }
    }
    read_transfers(*asker_.wanted().context, ready, *asker_.wanted().progress);
  }

  std::vector<ChunkRef> damaged() override {
    std::vector<ChunkRef> damaged;
    for (const auto& [tensor, chunk] : owner_.given_up()) damaged.push_back({tensor, chunk});
    return damaged;
  }

  void note_damaged(const std::vector<ChunkRef>& chunks) override {
    for (const ChunkRef& chunk : chunks) damaged_.emplace(chunk.tensor, chunk.chunk);
  }

  std::vector<Transfer> rest() override {
    asker_.expect_all(announced_);
    return asker_.rest(damaged_, false);
  }

 private:
  // Everything that is served of the transfer is in the page cache. What owners have checked is
  // read exactly, and what they declined of it is left for rest(). Other transfers are read as a
  // whole.
  void add_ready(size_t transfer, std::vector<Transfer>& ready) const {
    const bool checked = asker_.is_checked(transfer);
    const size_t before = ready.size();
    if (!checked || !asker_.any_declined(transfer)) {
      ready.push_back(asker_.wanted().transfers[transfer]);
    } else {
      for (const Asker::AskedTransfer* asked : served_of_[transfer]) {
        ready.push_back(asker_.cut_out(*asked));
      }
    }
    for (size_t i = before; i < ready.size(); ++i) ready[i].checked = checked;
  }

  void await() {
    awaited_.assign(asker_.wanted().transfers.size(), 0);
    served_of_.resize(awaited_.size());
    for (const std::vector<Asker::AskedTransfer>& of_owner : asker_.asked()) {
      for (const Asker::AskedTransfer& asked : of_owner) {
        const auto elements = static_cast<uint64_t>(asked.request.box.numel());
        if (!asked.served) continue;
        awaited_[asked.transfer] += elements;
        served_of_[asked.transfer].push_back(&asked);
      }
    }
  }

  bool is_checked(const TileRound::Loaded& loaded) const {
    return loaded.checked && owner_.tile(loaded.tile).blocks;
  }

  // Reads the round's blocks through the page cache, where they stay, and checks them before
  // anybody uses them. Returns how many bytes these are.
  uint64_t check(const TileRound& round) {
    TileRound checked;
    uint64_t bytes = 0;
    for (const TileRound::Loaded& loaded : round.parts) {
      if (!is_checked(loaded)) continue;
      checked.parts.push_back(loaded);
      checker_.add(owner_.range_of(loaded));
      bytes += loaded.part.size;
    }
    RangeReader::Unread unread;
    if (!keeping_.metadata.copies.empty()) {
      unread = [&](size_t i, const Error& error) {
        const ServedTile& tile = owner_.tile(checked.parts[i].tile);
        owner_.give_up({tile.tensor, tile.chunk}, error);
      };
    }
    const std::vector<ByteRange> ranges = checker_.read({}, unread);
    owner_.check_blocks(checked, ranges);
    return bytes;
  }

  static ReadContext keeping(ReadContext context) {
    context.cache = CachePolicy::kKeep;
    return context;
  }

  TileOwner& owner_;
  const Asker& asker_;
  const size_t world_;
  RangeReader reader_;
  const ReadContext keeping_;
  RangeReader checker_;
  std::vector<uint64_t> awaited_;  // by transfer: elements that are served, but not there yet
  std::vector<std::vector<const Asker::AskedTransfer*>> served_of_;  // by transfer
  uint64_t announced_ = 0;                                           // elements
  Asker::Chunks damaged_;
};

}  // namespace

std::unique_ptr<Carrier> carry_by_page_cache(const CarrierParts& parts) {
  return std::make_unique<ByPageCache>(parts);
}

}  // namespace tilestone::engine
