#include "tilestone/engine/save/described_internal.h"

#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/differing_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save/orders_internal.h"
#include "tilestone/state/content_hash.h"
#include "tilestone/state/list_lengths.h"

namespace tilestone::engine {
namespace {

// With whom this rank compares what; empty: it does not know without the coordinator.
ContentGroups groups_of(const RankPlanning& own) {
  return own.cached ? own.cached->groups : ContentGroups();
}

Bytes encoded_plan(const RankPlanning& own, SessionParts* session) {
  Bytes plan = own.share.local.encode();
  if (session != nullptr) session->count({0, 0, 0, plan.size()});
  return plan;
}

// Looks for the plan of an earlier save of the session in which this rank had the same structure.
void look_for_plan(RankPlanning& own, SessionParts* session) {
  if (session == nullptr || own.share.world_size == 1) return;
  own.structure = structure_of(own.share);
  const CachedPlan* const found = session->plans.find(*own.structure);
  if (found != nullptr) own.cached = *found;
}

// Hash of the common state; 0 in dialects without a common state.
uint64_t hash_of_common(RankPlanning& own, const RequestView& asked) {
  const SaveShare& share = own.share;
  if (!share.items.common) return 0;
  own.compared =
      asked.compared != nullptr ? items_of(*asked.compared, share).common : share.items.common;
  return content_hash(*own.compared);
}

void plan_locally(RankPlanning& own, const RequestView& asked, SessionParts* session) {
  SaveShare& share = own.share;
  const bool alone = share.world_size == 1;
  set_state(share, *asked.state);
  own.location = asked.location->shared();
  check_items(share, *own.location);
  own.message.group = replicate_group_of(share);
  share.local = make_local_plan(share.items);
  if (!own.message.group.empty()) note_contents_of_copied(share);
  look_for_plan(own, session);
  own.message.replicas = replicas_to_name(share);
  if (!alone) own.message.lists = hash_of(share.lists);
  if (compares(share)) {
    own.message.common = hash_of_common(own, asked);
    // The planner copies each common object whose content is noted.
    note_contents(share, share.items.common.has_value(), groups_of(own));
    own.message.contents = contents_by_group(share.local, groups_of(own));
  }
  if (own.cached) {
    own.message.made_in = own.cached->made_in;
  } else if (!alone || share.options.checks.access) {
    own.message.plan = encoded_plan(own, session);
  }
}

}  // namespace

RankPlanning describe(const MadeRequest& request, int rank, int world_size, SessionParts* session) {
  const RequestView& asked = expect_made(request);
  RankPlanning own;
  own.share.rank = rank;
  own.share.world_size = world_size;
  own.share.one_writer = asked.one_writer;
  set_options(own.share, *asked.options);
  check_options(own.share.options);
  plan_locally(own, asked, session);
  const EarlierSave* const earlier = earlier_of(session);
  own.message.earlier = (earlier != nullptr ? earlier->look() : InFlight()).encoded();
  own.terms = terms_of(*asked.location, own.share.options);
  return own;
}

Bytes first_message(RankPlanning& own) {
  const PlanMessage message = std::exchange(own.message, {});
  return with_terms(message.encode(), own.terms);
}

Bytes late_plan(RankPlanning& own, SessionParts* session) {
  const bool unsent = own.cached.has_value();
  own.cached.reset();
  for (PlanChunk& chunk : own.share.local.chunks) {
    if (!is_compared(own.share.local, chunk)) chunk.content = 0;  // was contested in that plan
  }
  return unsent ? encoded_plan(own, session) : Bytes();
}

Bytes reply_to(RankPlanning& own, const Question& question) {
  own.common_differs = question.other >= 0;
  Reply reply;
  const bool is_asked = own.share.rank == 0 || own.share.rank == question.other;
  if (question.other >= 0 && is_asked) reply.parts = content_parts(*own.compared);
  if (question.lists) reply.lists = std::move(own.share.lists);
  note_chunks(own.share, question.chunks);
  reply.contents = named_contents(own.share.local, groups_of(own), question.groups, question.chunks,
                                  own.cached ? own.cached->assignment : own.share.assignment);
  return reply.encode();
}

PlannedShare follow(RankPlanning own, Orders orders, SessionParts* session) {
  SaveShare& share = own.share;
  // As in Megatron-Core, where each rank says that its common state differs.
  if (!share.dialect->common_object().empty()) tell_of_lost(share.rank, orders.lost);
  if (orders.way == Orders::Way::kAsBefore) {
    if (!own.cached) {
      throw Error(ErrorCode::kInternal,
                  "rank 0 expects a cached plan that this rank does not have");
    }
    orders.assignment = std::move(own.cached->assignment);
    orders.grids = std::move(own.cached->grids);
    session->count({0, 0, 1, 0});
  } else if (own.structure && !orders.groups.empty()) {
    session->plans.put({*own.structure, orders.save_id, orders.assignment, orders.grids,
                        ContentGroups::decode(orders.groups, share.local.objects.size(),
                                              share.local.chunks.size())});
    session->count({0, 1, 0, 0});
  }
  PlannedShare planned;
  share.save_id = planned.result.save_id = orders.save_id;
  share.assignment = std::move(orders.assignment);
  limit_and_count_copies(share, planned.result);
  if (share.format->needs_grid()) set_grids(share, orders.grids);
  planned.result.common_differs = own.common_differs;
  planned.location = std::move(own.location);
  planned.sibling = orders.sibling;
  planned.share = std::move(share);
  return planned;
}

}  // namespace tilestone::engine
