// How the coordinator plans a save: the ranks' messages, and the orders that it sends back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// A rank's message to the coordinator.
struct PlanMessage {
  uint64_t common = 0;               // content hash of its common state; 0: not compared
  std::vector<std::string> empties;  // by rule: keys of its tensors without elements
  // CachedPlan::made_in, if the rank has a cached plan for what it saves. It then does not send the
  // plan. "": no cached plan.
  std::string made_in = {};
  uint64_t contents = 0;  // contents_of() this rank's plan, if it is cached; 0: not compared
  // By exchange: the ranks whose chunks this rank copies, ascending; empty: none.
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
  enum class Way : uint8_t { kExchange, kRule, kAsBefore };
  Way way = Way::kExchange;
  Assignment assignment = {};  // kExchange only; with kAsBefore the cached plan has it
  // kRule: the keys of tensors without elements that this rank writes.
  std::vector<std::string> empties = {};
  std::vector<Dims> grids = {};  // one per tensor of its plan, if the format needs grids

  Bytes encode() const;
  static Orders decode(ByteView bytes);
};

// The functions below return the encoded orders of each rank.
//
// By rule. Of the ranks that hold a tensor without elements, the lowest writes it.
std::vector<Bytes> orders_by_rule(const std::vector<PlanMessage>& messages,
                                  const std::string& save_id);
// By exchange. Clears the plans in `messages` to free memory. Throws what SavePlanner, plan_grids()
// and tell_of_differing() throw.
std::vector<Bytes> orders_by_exchange(std::vector<PlanMessage>& messages,
                                      const std::string& save_id, const Format& format,
                                      SaveOptions::Differing differing);
// Each rank writes what its cached plan says.
std::vector<Bytes> orders_as_before(size_t ranks, const std::string& save_id);
// For a group of one rank.
std::vector<Bytes> orders_for_one(const LocalSavePlan& plan, const std::string& save_id,
                                  const Format& format);

// Reports common objects whose content differs between ranks: throws Error(kMismatch) if
// `common_differs` is kError, else logs a warning, only once in the process for the same text (a
// trainer saves the same state many times).
void tell_of_differing(const std::vector<DifferingObject>& differing,
                       SaveOptions::Differing common_differs);

}  // namespace tilestone::engine
