// Each owner has a thread that makes its rounds ahead of time. Meanwhile the ranks read what
// earlier rounds have brought into the page cache: only what they want, straight into their
// tensors. A rank reads a transfer when everything that is served of it is there.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/call_scope.h"
#include "tilestone/engine/exchange/carrier_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kCachedPortion = 32u << 20;  // bytes that an owner prefetches at once
constexpr uint64_t kLeastFetched = 16u << 20;   // bytes from the disk that are enough for a round
constexpr size_t kMaxAhead = 3;                 // rounds

// Makes rounds of messages on a thread of its own, so that the disk is busy while the ranks
// exchange messages and copy.
class RoundsAhead {
 public:
  // The thread calls make() as long as more() is true and no call fails. Nothing else may call
  // them, or use what they use, until the last round is taken.
  RoundsAhead(std::function<bool()> more, std::function<std::vector<Bytes>()> make)
      : more_(std::move(more)),
        make_(std::move(make)),
        call_(CallScope::current()),
        thread_([this] { run(); }) {}
  // Waits for the round that is being made.
  ~RoundsAhead() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  RoundsAhead(const RoundsAhead&) = delete;
  RoundsAhead& operator=(const RoundsAhead&) = delete;

  // Waits for the messages of the next round and returns them. After the last round: the messages
  // of an empty round. Throws the error of the round if it failed.
  std::vector<Bytes> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ || !rounds_.empty(); });
    if (rounds_.empty()) {
      if (failure_) std::rethrow_exception(failure_);
      return make_();
    }
    std::vector<Bytes> round = std::move(rounds_.front());
    rounds_.pop_front();
    changed_.notify_all();
    return round;
  }

 private:
  void run() {
    const CallScope scope(call_);
    std::exception_ptr failure;
    try {
      while (more_()) {
        std::vector<Bytes> round = make_();
        std::unique_lock lock(mutex_);
        rounds_.push_back(std::move(round));
        changed_.notify_all();
        changed_.wait(lock, [&] { return stopped_ || rounds_.size() < kMaxAhead; });
        if (stopped_) return;
      }
    } catch (...) {
      failure = std::current_exception();
    }
    std::lock_guard lock(mutex_);
    failure_ = failure;
    ended_ = true;
    changed_.notify_all();
  }

  const std::function<bool()> more_;
  const std::function<std::vector<Bytes>()> make_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::vector<Bytes>> rounds_;
  std::exception_ptr failure_;
  bool ended_ = false;    // no round follows those in rounds_
  bool stopped_ = false;  // no more rounds are wanted
  void* const call_;      // the call that the thread works for
  std::thread thread_;    // the last member, because it uses the others
};

class ByPageCache final : public Carrier {
 public:
  explicit ByPageCache(const CarrierParts& parts)
      : owner_(parts.owner),
        asker_(parts.asker),
        world_(static_cast<size_t>(parts.world)),
        reader_(*asker_.wanted().context, nullptr),
        keeping_(keeping(*asker_.wanted().context)),
        checker_(keeping_, nullptr) {}

  std::vector<Bytes> next_round() override {
    if (!ahead_ && owner_.more()) {
      ahead_.emplace([this] { return owner_.more(); }, [this] { return make_round(); });
    }
    return ahead_ ? ahead_->take() : make_round();
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

  // Makes one round: brings in portions until they are enough. Tiles that are checked are read by
  // their owner; others are only prefetched, and do not count if they are in the page cache
  // already. Runs only on the calling thread, because the pool's threads are busy reading.
  std::vector<Bytes> make_round() {
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
  std::optional<RoundsAhead> ahead_;  // the last member, because it uses the others
};

}  // namespace

std::unique_ptr<Carrier> carry_by_page_cache(const CarrierParts& parts) {
  return std::make_unique<ByPageCache>(parts);
}

}  // namespace tilestone::engine
