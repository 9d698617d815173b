#include "tilestone/engine/exchange/exchange_internal.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "tilestone/base/call_scope.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/exchange/carrier_internal.h"
#include "tilestone/engine/exchange/exchange_asker_internal.h"
#include "tilestone/engine/exchange/exchange_owner_internal.h"
#include "tilestone/engine/exchange/exchange_wire_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kMostCached = 3;  // rounds that are in the page cache before they are taken

// Makes rounds of messages on a thread of its own, so that the disk is busy while the ranks
// exchange messages and copy.
class RoundsAhead {
 public:
  // The thread calls make() as long as more() is true and no call fails. Nothing else may call
  // them, or use what they use, until the last round is taken.
  // `most`: rounds that are made before they are taken.
  RoundsAhead(size_t most, std::function<bool()> more, std::function<std::vector<Bytes>()> make)
      : most_(most),
        more_(std::move(more)),
        make_(std::move(make)),
        worked_for_(CallScope::current()),
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
    const CallScope scope(worked_for_);
    std::exception_ptr failure;
    try {
      while (more_()) {
        std::vector<Bytes> round = make_();
        std::unique_lock lock(mutex_);
        rounds_.push_back(std::move(round));
        changed_.notify_all();
        changed_.wait(lock, [&] { return stopped_ || rounds_.size() < most_; });
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

  const size_t most_;
  const std::function<bool()> more_;
  const std::function<std::vector<Bytes>()> make_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::vector<Bytes>> rounds_;
  std::exception_ptr failure_;
  bool ended_ = false;          // no round follows those in rounds_
  bool stopped_ = false;        // no more rounds are wanted
  const WorkedFor worked_for_;  // by the thread
  std::thread thread_;          // the last member, because it uses the others
};

class Exchange {
 public:
  Exchange(Rounds& rounds, ReadFor way, Deadline deadline, uint64_t buffer_bytes)
      : rounds_(rounds),
        comm_(rounds.comm()),
        way_(way),
        deadline_(deadline),
        buffer_bytes_(buffer_bytes) {}

  std::vector<Transfer> run(std::variant<Wanted, Error> wanted) {
    std::vector<Bytes> received = step([&] {
      if (const auto* error = std::get_if<Error>(&wanted)) throw *error;
      start(std::get<Wanted>(std::move(wanted)));
      return offer_memory(asker_->requests());
    });
    received = step([&] { return find_memory(received, owner_->decide(received)); });
    // What was received is accepted in the next step, which sends a failure to the other ranks.
    std::function<void()> accept = [&] {
      asker_->note_verdicts(received);
      note_readers(received);
    };
    while (any_more(received)) {
      received = step([&] {
        accept();
        return next_round();
      });
      accept = [&] { carrier_->accept(decoded(received)); };
    }
    if (copies_) {
      received = step([&] {
        accept();
        const Bytes damaged = encode_chunks(carrier_->damaged());
        return std::vector<Bytes>(static_cast<size_t>(comm_.size()), damaged);
      });
      accept = [&] { carrier_->note_damaged(all_chunks(received)); };
    }
    accept();
    return carrier_->rest();
  }

 private:
  template <typename Make>
  std::vector<Bytes> step(const Make& make) {
    return rounds_.exchange("two-phase reading", deadline_, make);
  }

  void start(Wanted wanted) {
    const ReadContext& context = *wanted.context;
    copies_ = !context.metadata.copies.empty();
    owners_.emplace(context.metadata, comm_.size(), std::move(wanted.file_owners));
    asker_.emplace(std::move(wanted), *owners_, comm_.size(), way_);
    owner_.emplace(context, *owners_, comm_.size());
    const CarrierParts parts{*owners_, *owner_, *asker_, comm_.rank(), comm_.size()};
    const uint64_t message_bytes = buffer_bytes_ / 8;
    if (way_ == ReadFor::kSharedMemory) memory_.make(message_bytes);
    carrier_ = way_ == ReadFor::kPageCache ? carry_by_page_cache(parts)
                                           : carry_by_messages(parts, message_bytes, memory_);
  }

  std::vector<Bytes> offer_memory(std::vector<Bytes> messages) const {
    const std::string name = memory_.own != nullptr ? memory_.own->name() : "";
    for (Bytes& message : messages) message = with_note(name, message);
    return messages;
  }

  // Says to each rank whether this one can read its memory.
  std::vector<Bytes> find_memory(const std::vector<Bytes>& offers, std::vector<Bytes> messages) {
    for (size_t rank = 0; rank < offers.size(); ++rank) {
      memory_.others.push_back(SharedMemory::find(note_of(offers[rank])));
      const bool is_found = memory_.others.back() != nullptr;
      messages[rank] = with_note(is_found ? "found" : "", messages[rank]);
    }
    return messages;
  }

  void note_readers(const std::vector<Bytes>& messages) {
    for (const Bytes& message : messages) memory_.readers.push_back(!note_of(message).empty());
  }

  std::vector<Bytes> next_round() {
    const auto make = [this] { return carrier_->next_round(); };
    if (!ahead_ && owner_->more()) {
      const size_t most = way_ == ReadFor::kPageCache ? kMostCached : HostMemory::kMostAhead;
      ahead_.emplace(most, [this] { return owner_->more(); }, make);
    }
    return ahead_ ? ahead_->take() : make();
  }

  static bool any_more(const std::vector<Bytes>& received) {
    return std::any_of(received.begin(), received.end(),
                       [](const Bytes& message) { return more_in(message); });
  }

  static std::vector<RoundMessage> decoded(const std::vector<Bytes>& received) {
    std::vector<RoundMessage> round;
    for (size_t from = 0; from < received.size(); ++from) {
      round.push_back(decode_round(received[from], static_cast<int>(from)));
    }
    return round;
  }

  static std::vector<ChunkRef> all_chunks(const std::vector<Bytes>& received) {
    std::vector<ChunkRef> all;
    for (size_t from = 0; from < received.size(); ++from) {
      const std::vector<ChunkRef> some = decode_chunks(received[from], static_cast<int>(from));
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }

  Rounds& rounds_;
  const Communicator& comm_;
  const ReadFor way_;
  const Deadline deadline_;
  const uint64_t buffer_bytes_;
  std::optional<StripeOwners> owners_;
  std::optional<Asker> asker_;
  std::optional<TileOwner> owner_;
  HostMemory memory_;
  std::unique_ptr<Carrier> carrier_;  // uses the members above
  bool copies_ = false;               // whether the checkpoint has copies; equal on all ranks
  std::optional<RoundsAhead> ahead_;  // the last member, because it uses the others
};

}  // namespace

ReadFor reading_of_ranks(Reading::TwoPhase mode, std::span<const std::string> hosts,
                         const StorageFacts& storage) {
  if (hosts.size() < 2 || mode == Reading::TwoPhase::kNever) return ReadFor::kOneself;
  const bool one_host = std::all_of(hosts.begin(), hosts.end(),
                                    [&](const std::string& host) { return host == hosts.front(); });
  if (mode == Reading::TwoPhase::kAlways || !one_host) return ReadFor::kMessages;
  if (!storage.page_cache) return ReadFor::kSharedMemory;
  return storage.shared_cache ? ReadFor::kPageCache : ReadFor::kOneself;
}

uint64_t pool_share(uint64_t buffer_bytes, ReadFor way) {
  const bool sends = way == ReadFor::kMessages || way == ReadFor::kSharedMemory;
  return sends ? buffer_bytes / 2 : buffer_bytes;
}

std::vector<Transfer> exchange_transfers(Rounds& rounds, ReadFor way, Deadline deadline,
                                         uint64_t buffer_bytes,
                                         std::variant<Wanted, Error> wanted) {
  if (way != ReadFor::kOneself) {
    return Exchange(rounds, way, deadline, buffer_bytes).run(std::move(wanted));
  }
  if (const auto* error = std::get_if<Error>(&wanted)) throw *error;
  return std::get<Wanted>(std::move(wanted)).transfers;
}

}  // namespace tilestone::engine
