// What the ranks of a save with a communicator send each other while they plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/plan/contents.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/content_parts.h"
#include "tilestone/state/list_lengths.h"

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
  Bytes earlier = {};  // InFlight::encode()
  Bytes plan = {};     // LocalSavePlan::encode(), if plans are exchanged or validated

  Bytes encode() const;
  static PlanMessage decode(Bytes message);
};

// ---- The coordinator's answer to a planning message

enum class Answer : uint8_t {
  kOrders,     // the rank's orders: planning has ended
  kCompare,    // a question: ranks may hold different versions of something
  kSendPlans,  // send the plan, if it was not sent: another rank's plan has changed
  kEarlier,    // wait for an earlier save of the session, or fail with it (in_flight_internal.h)
};
Answer kind_of(ByteView answer);  // throws if it is empty
Bytes ask_for_plan();

// The answer kCompare: what the coordinator asks one rank, so that the ranks compare what they hold
// (plan/contents.h).
struct Question {
  // The common states differ. Rank 0 and this rank send theirs; -1: they do not differ.
  int other = -1;
  bool lists = false;            // send the lists
  std::vector<uint64_t> groups;  // send what it holds of these groups; ascending
  std::vector<uint32_t> chunks;  // and of these chunks

  Bytes encode() const;
  static Question decode(ByteView answer);
};
struct Reply {
  std::vector<ContentPart> parts = {};  // of the common state
  std::vector<ListLength> lists = {};
  std::vector<NamedContent> contents = {};

  Bytes encode() const;
  static Reply decode(ByteView bytes);
};

// The answer kOrders: what a rank is to do, once the ranks have agreed.
struct Orders {
  std::string save_id;
  enum class Way : uint8_t { kExchange, kAsBefore };
  Way way = Way::kExchange;
  Assignment assignment = {};          // kExchange only; with kAsBefore the cached plan has it
  std::vector<Dims> grids = {};        // one per tensor of its plan, if the format needs grids
  Bytes groups = {};                   // ContentGroups::encode(), if the coordinator keeps plans
  std::string sibling = {};            // see PlannedShare::sibling
  std::vector<std::string> lost = {};  // keys of which another rank's version is saved

  Bytes encode() const;
  static Orders decode(ByteView answer);
};

}  // namespace tilestone::engine
