// The first step of a save by rounds, which each rank takes alone: it describes to the coordinator
// what it saves. Then it follows the coordinator's answers, each rank alone too.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/save/messages_internal.h"
#include "tilestone/engine/save/planned_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/session_parts_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/state/value.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// What a rank knows while the ranks plan.
struct RankPlanning {
  std::shared_ptr<Storage> location;
  SaveShare share;
  PlanMessage message;  // to the coordinator, until first_message()
  Terms terms;          // likewise
  bool common_differs = false;
  std::optional<Value> compared;      // the common state that is compared
  std::optional<uint64_t> structure;  // of this rank's plan, if a session keeps plans
  std::optional<CachedPlan> cached;   // for `structure`, unless the plans are exchanged
};

// Makes items of the state, checks them and the options, and plans locally. Throws the request's
// error, if there is one, and every error that the state or the options deserve. `session`: null
// without one, as below.
RankPlanning describe(const MadeRequest& request, int rank, int world_size, SessionParts* session);

// The first message; to be called once, because the plan in it may be large and is not kept.
Bytes first_message(RankPlanning& own);
// The plan, if this rank has not sent it yet: for the answer kSendPlans.
Bytes late_plan(RankPlanning& own, SessionParts* session);
// For the answer kCompare. The coordinator reports what differs.
Bytes reply_to(RankPlanning& own, const Question& question);
// For the answer kOrders.
PlannedShare follow(RankPlanning own, Orders orders, SessionParts* session);

}  // namespace tilestone::engine
