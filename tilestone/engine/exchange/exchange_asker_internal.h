// One rank's part in two-phase reading as one that wants something.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tilestone/engine/exchange/exchange_internal.h"
#include "tilestone/engine/exchange/exchange_wire_internal.h"
#include "tilestone/plan/exchange_plan.h"

namespace tilestone::engine {

class Asker {
 public:
  struct Asked {
    Request request;
    size_t transfer = 0;  // index into the wanted ones
    bool served = false;
  };

  // Cuts the transfers into requests to the tiles' owners. What is compressed is not asked for.
  Asker(Wanted wanted, const StripeOwners& owners, int world);

  const Wanted& wanted() const { return wanted_; }
  std::vector<Bytes> requests() const;  // one message for each owner
  void take_verdicts(const std::vector<Bytes>& messages);

  // By an owner's number of it. Error(kInternal) when it was never made. Any thread.
  const Asked& find(int owner, uint32_t request) const;
  const std::vector<std::vector<Asked>>& asked() const { return asked_; }  // by owner
  bool any_served(size_t transfer) const { return !unserved_[transfer]; }
  // The transfers of which nothing is served.
  std::vector<Transfer> unserved() const;
  // Error(kInternal) unless so many elements are served.
  void expect_all(uint64_t elements) const;

 private:
  Wanted wanted_;
  std::vector<std::vector<Asked>> asked_;  // by owner
  std::vector<bool> unserved_;             // by transfer
  uint64_t promised_ = 0;                  // elements
};

}  // namespace tilestone::engine
