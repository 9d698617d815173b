// The planning of a save at the coordinator: what ranks say, and what each is told to do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// What a rank says.
struct PlanMessage {
  uint64_t common = 0;               // content hash of its common state; 0: not to be compared
  std::vector<std::string> empties;  // by rule: its tensors without elements
  // Where it has a cached plan for what it saves, which it then does not send: CachedPlan::made_in.
  std::string made_in = {};
  uint64_t contents = 0;  // then: contents_of() its plan; 0: not to be compared
  // By exchange: whose chunks it copies, ascending; empty: none.
  std::vector<int> group = {};
  // SaveOptions::tp_replica_names: tensors of which it is such a rank but the first, and which.
  ReplicaNames replicas = {};
  Bytes plan = {};  // LocalSavePlan::encode() where ranks exchange plans, or validate them

  Bytes encode() const;
  static PlanMessage decode(Bytes message);
};

// What a rank learns when the planning is agreed.
struct Orders {
  std::string save_id;
  enum class Way : uint8_t { kExchange, kRule, kAsBefore };
  Way way = Way::kExchange;
  Assignment assignment = {};  // by exchange; as before: what the rank's cached plan says
  // By rule: the tensors without elements that this rank writes.
  std::vector<std::string> empties = {};
  std::vector<Dims> grids = {};  // of the tensors of its plan, where the format needs grids

  Bytes encode() const;
  static Orders decode(ByteView bytes);
};

// Encoded, for each rank. By rule a rank writes the empty tensors that no lower rank has.
std::vector<Bytes> orders_by_rule(const std::vector<PlanMessage>& messages,
                                  const std::string& save_id);
// By exchange, which takes the plans out of the messages. Errors: SavePlanner's, plan_grids(), and
// what tell_of_differing() throws.
std::vector<Bytes> orders_by_exchange(std::vector<PlanMessage>& messages,
                                      const std::string& save_id, const Format& format,
                                      SaveOptions::Differing differing);
// Each rank saves what it saved when its cached plan was made.
std::vector<Bytes> orders_as_before(size_t ranks, const std::string& save_id);
std::vector<Bytes> orders_for_one(const LocalSavePlan& plan, const std::string& save_id,
                                  const Format& format);

// Objects that every rank has and that are not the same on all: a warning, once in the process for
// the same keys (a trainer saves the same state many times), or Error(kMismatch).
void tell_of_differing(const std::vector<DifferingObject>& differing,
                       SaveOptions::Differing common_differs);

}  // namespace tilestone::engine
