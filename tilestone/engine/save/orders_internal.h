// How the coordinator of a save by rounds plans: functions of the ranks' messages, between which
// `CoordinatorPlanning` goes from one round to the next. They send nothing, and change nothing at
// the location.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/save/messages_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

struct CoordinatorPlanning {
  std::vector<PlanMessage> messages;  // by rank
  ReplicaNames replicas;              // additional names for the index
  bool as_before = false;             // all ranks use their cached plans
  std::string save_id;
  std::vector<Orders> orders;               // by rank
  std::vector<int> others;                  // ranks whose common state is not rank 0's
  std::vector<DifferingContent> differing;  // what else the ranks hold differently
  std::vector<ContestedChunk> contested;    // what must be compared for that
};

// Begins with the ranks' first messages, which end with their terms. Error(kMismatch) where the
// terms differ.
CoordinatorPlanning planning_of(std::vector<Bytes> messages);
// Whether the ranks that have sent no plan must do so, because another rank's plan has changed.
bool needs_plans(const CoordinatorPlanning& planning);
// Takes the plans that were sent then; those of the other ranks are empty.
void add_plans(CoordinatorPlanning& planning, std::vector<Bytes> plans);
// Decides who writes what. Returns a question for each rank, encoded as Answer::kCompare; none: the
// ranks hold nothing different. `own`: the coordinator's share. `keeps_plans`: in a session. Throws
// what check_access(), SavePlanner and plan_grids() throw.
std::vector<Bytes> make_orders(CoordinatorPlanning& planning, const SaveShare& own,
                               bool keeps_plans);
// Takes the replies to the questions. Error(kMismatch) where the ranks' common states differ and
// checks.common_differs is kError; what expect_same_lengths() throws.
void add_replies(CoordinatorPlanning& planning, const std::vector<Bytes>& replies,
                 const SaveShare& own);
// Ends the planning, after all comparisons: reports what differs. Throws what tell_of_differing()
// throws.
void end_planning(CoordinatorPlanning& planning, const SaveShare& own);

// True if the ranks compare what should be equal on all of them.
bool compares(const SaveShare& share);

// ---- The orders of each rank

struct ExchangedOrders {
  std::vector<Orders> orders;
  std::vector<DifferingContent> differing;  // among the contents in the plans
  std::vector<ContestedChunk> contested;
};
// Clears the plans in `messages` to free memory. `groups`: the orders shall have ContentGroups.
// Throws what SavePlanner and plan_grids() throw.
ExchangedOrders orders_by_exchange(std::vector<PlanMessage>& messages, const std::string& save_id,
                                   const Format& format, bool groups);

}  // namespace tilestone::engine
