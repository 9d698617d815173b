// The asker: one rank's part in two-phase reading as a rank that wants elements.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/engine/exchange/exchange_internal.h"
#include "tilestone/engine/exchange/exchange_wire_internal.h"
#include "tilestone/plan/exchange_plan.h"

namespace tilestone::engine {

class Asker {
 public:
  struct AskedTransfer {
    TileRequest request;
    size_t transfer = 0;  // index into Wanted::transfers
    bool served = false;  // the owner's verdict
  };

  // Cuts the transfers into requests to the tiles' owners. Compressed chunks are not requested.
  Asker(Wanted wanted, const StripeOwners& owners, int world, ReadFor way);

  const Wanted& wanted() const { return wanted_; }
  std::vector<Bytes> requests() const;  // one message for each rank
  void note_verdicts(const std::vector<Bytes>& messages);

  // The request with number `request` among those to `owner`. Error(kInternal) if there is none.
  // May be called from any thread.
  const AskedTransfer& find(int owner, uint32_t request) const;
  const std::vector<std::vector<AskedTransfer>>& asked() const { return asked_; }  // by owner
  bool any_declined(size_t transfer) const { return declined_[transfer]; }
  // Whether owners check what they serve of the transfer.
  bool is_checked(size_t transfer) const { return checked_[transfer]; }
  // The part of a transfer that a request covers. May be called from any thread.
  Transfer cut_out(const AskedTransfer& asked) const;

  // What the rank must still read itself after the rounds: what was declined, and what was served
  // of the `damaged` chunks (tensor and chunk), from another place. Transfers that were served in
  // part are left out if owners don't check them and !unchecked.
  using Chunks = std::set<std::pair<uint32_t, uint32_t>>;
  std::vector<Transfer> rest(const Chunks& damaged, bool unchecked) const;
  // Error(kInternal) unless the served requests have this number of elements in all.
  void expect_all(uint64_t elements) const;

 private:
  Wanted wanted_;
  std::vector<std::vector<AskedTransfer>> asked_;  // by owner
  std::vector<bool> unserved_;                     // by transfer: none of its requests is served
  std::vector<bool> declined_;                     // by transfer: one of its requests is not served
  std::vector<bool> checked_;                      // by transfer: by the owners of its blocks
  uint64_t promised_ = 0;                          // elements of the served requests
};

}  // namespace tilestone::engine
