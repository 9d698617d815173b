// One rank's part in two-phase reading as one that wants something.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "tilestone/engine/exchange/exchange_internal.h"
#include "tilestone/engine/exchange/exchange_wire_internal.h"
#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/plan/exchange_plan.h"

namespace tilestone::engine {

class Asker {
 public:
  // Cuts the transfers into requests to the tiles' owners. What is compressed is not asked for.
  Asker(Wanted wanted, const StripeOwners& owners, int world);

  std::vector<Bytes> requests() const;  // one message for each owner
  void take_verdicts(const std::vector<Bytes>& messages);
  // Delivers what a round brought; checks are the owner's business.
  void take(const std::vector<RoundMessage>& round);
  // By the page cache: reads the transfers of which a round brought the last served element.
  void read_announced(const std::vector<RoundMessage>& round);
  // An element's way from an owner that asks itself. Any thread.
  void put(int owner, uint32_t request, const StoredPayload& payload, const Part& part,
           ByteView bytes);

  // After the rounds: what is still to be read. Error(kInternal) when an owner kept something
  // back.
  std::vector<Transfer> rest() const;

 private:
  struct Asked {
    Request request;
    size_t transfer = 0;  // index into the wanted ones
    bool served = false;
  };
  Asked& find(int owner, uint32_t request);
  Transfer cut_out(const Asked& asked) const;

  Wanted wanted_;
  std::vector<std::vector<Asked>> asked_;  // by owner
  std::vector<bool> whole_;                // transfers of which nothing is served
  std::vector<uint64_t> awaited_;          // elements that are served, of each transfer
  bool by_transfers_ = false;              // what is served is read as whole transfers
  uint64_t promised_ = 0;                  // elements
  std::atomic<uint64_t> delivered_ = 0;    // elements
  std::mutex device_;
};

}  // namespace tilestone::engine
