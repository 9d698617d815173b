#include "tilestone/engine/exchange/exchange_internal.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/exchange/carrier_internal.h"
#include "tilestone/engine/exchange/exchange_asker_internal.h"
#include "tilestone/engine/exchange/exchange_owner_internal.h"
#include "tilestone/engine/exchange/exchange_wire_internal.h"

namespace tilestone::engine {
namespace {

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
      return asker_->requests();
    });
    received = step([&] { return owner_->decide(received); });
    // What was received is accepted in the next step, which sends a failure to the other ranks.
    std::function<void()> accept = [&] { asker_->note_verdicts(received); };
    while (any_more(received)) {
      received = step([&] {
        accept();
        return carrier_->next_round();
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
    carrier_ = way_ == ReadFor::kPageCache ? carry_by_page_cache(parts)
                                           : carry_by_messages(parts, buffer_bytes_ / 8);
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
  std::unique_ptr<Carrier> carrier_;  // uses the members above
  bool copies_ = false;               // whether the checkpoint has copies; equal on all ranks
};

}  // namespace

ReadFor reading_of_ranks(Reading::TwoPhase mode, std::span<const std::string> hosts,
                         const StorageFacts& storage) {
  if (hosts.size() < 2 || mode == Reading::TwoPhase::kNever) return ReadFor::kOneself;
  const bool one_host = std::all_of(hosts.begin(), hosts.end(),
                                    [&](const std::string& host) { return host == hosts.front(); });
  const bool has_cache = mode == Reading::TwoPhase::kAuto && one_host && storage.page_cache;
  if (!has_cache) return ReadFor::kMessages;
  return storage.shared_cache ? ReadFor::kPageCache : ReadFor::kOneself;
}

uint64_t pool_share(uint64_t buffer_bytes, ReadFor way) {
  return way == ReadFor::kMessages ? buffer_bytes / 2 : buffer_bytes;
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
