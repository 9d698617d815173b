// How the coordinator plans a save: the ranks' messages, and the orders that it sends back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/plan/contents.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// A rank's message to the coordinator.
struct PlanMessage {
  uint64_t common = 0;  // content hash of its common state; 0: not compared
  uint64_t lists = 0;   // hash_of() its list_lengths()
  // CachedPlan::made_in, if the rank has a cached plan for what it saves. It then does not send the
  // plan. "": no cached plan.
  std::string made_in = {};
  // Hashes of what it holds, if it has a cached plan, which says with whom to compare it.
  std::vector<GroupContent> contents = {};
  // The ranks whose chunks this rank copies, ascending; empty: none.
  std::vector<int> group = {};
  // With SaveOptions::tp_replica_names: the result of replicas_to_name() on this rank.
  ReplicaNames replicas = {};
  Bytes plan = {};  // LocalSavePlan::encode(), if plans are exchanged or validated

  Bytes encode() const;
  static PlanMessage decode(Bytes message);
};

// What a rank is to do, once the ranks have agreed.
struct Orders {
  std::string save_id;
  enum class Way : uint8_t { kExchange, kAsBefore };
  Way way = Way::kExchange;
  Assignment assignment = {};    // kExchange only; with kAsBefore the cached plan has it
  std::vector<Dims> grids = {};  // one per tensor of its plan, if the format needs grids
  Bytes groups = {};  // ContentGroups::encode(), if the coordinator keeps plans in a session

  Bytes encode() const;
  static Orders decode(ByteView bytes);
};

// ---- The encoded orders of each rank

struct ExchangedOrders {
  std::vector<Bytes> orders;
  std::vector<DifferingContent> differing;  // among the contents in the plans
  std::vector<ContestedChunk> contested;
};
// Clears the plans in `messages` to free memory. `groups`: the orders shall have ContentGroups.
// Throws what SavePlanner and plan_grids() throw.
ExchangedOrders orders_by_exchange(std::vector<PlanMessage>& messages, const std::string& save_id,
                                   const Format& format, bool groups);
// Each rank writes what its cached plan says.
std::vector<Bytes> orders_as_before(size_t ranks, const std::string& save_id);
// For a group of one rank.
std::vector<Bytes> orders_for_one(const LocalSavePlan& plan, const std::string& save_id,
                                  const Format& format);

}  // namespace tilestone::engine
