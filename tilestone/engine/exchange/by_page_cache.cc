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
        reader_(*asker_.wanted().context, nullptr) {}

  std::vector<Bytes> next_round() override {
    if (!ahead_ && owner_.more()) {
      ahead_.emplace([this] { return owner_.more(); }, [this] { return bring_in(); });
    }
    return ahead_ ? ahead_->take() : bring_in();
  }

  void take(const std::vector<RoundMessage>& round) override {
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
        if (awaited == 0) ready.push_back(asker_.wanted().transfers[transfer]);
      }
    }
    read_transfers(*asker_.wanted().context, ready, *asker_.wanted().progress);
  }

  std::vector<Transfer> rest() override {
    asker_.expect_all(announced_);
    return asker_.unserved();
  }

 private:
  void await() {
    awaited_.assign(asker_.wanted().transfers.size(), 0);
    for (const std::vector<Asker::AskedTransfer>& of_owner : asker_.asked()) {
      for (const Asker::AskedTransfer& asked : of_owner) {
        const auto elements = static_cast<uint64_t>(asked.request.box.numel());
        if (asked.served) awaited_[asked.transfer] += elements;
      }
    }
  }

  // Makes one round: prefetches portions until kLeastFetched bytes have come from the disk. What is
  // in the page cache already does not count. Runs only on the calling thread, because the pool's
  // threads are busy reading.
  std::vector<Bytes> bring_in() {
    std::vector<RoundMessage> messages(world_);
    const uint64_t pair_bytes = std::max(kCachedPortion / world_, kLeastPair);
    for (uint64_t fetched = 0; owner_.more() && fetched < kLeastFetched;) {
      const TileRound round = owner_.plan_round(pair_bytes, reader_);
      fetched += reader_.prefetch();
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

  TileOwner& owner_;
  const Asker& asker_;
  const size_t world_;
  RangeReader reader_;
  std::vector<uint64_t> awaited_;     // by transfer: elements that are served, but not there yet
  uint64_t announced_ = 0;            // elements
  std::optional<RoundsAhead> ahead_;  // the last member, because it uses the others
};

}  // namespace

std::unique_ptr<Carrier> carry_by_page_cache(const CarrierParts& parts) {
  return std::make_unique<ByPageCache>(parts);
}

}  // namespace tilestone::engine
