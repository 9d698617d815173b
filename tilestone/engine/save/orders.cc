#include "tilestone/engine/save/orders_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/uuid.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/differing_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/save/common_state_internal.h"
#include "tilestone/engine/save/compare_internal.h"
#include "tilestone/engine/save/plan_cache_internal.h"
#include "tilestone/plan/access.h"
#include "tilestone/plan/grid_plan.h"

namespace tilestone::engine {
namespace {

std::vector<std::vector<Dims>> grids_of(const std::vector<PlanMessage>& messages) {
  std::vector<LocalSavePlan> decoded;
  for (const PlanMessage& message : messages) {
    decoded.push_back(LocalSavePlan::decode(message.plan));
  }
  return plan_grids(decoded);
}

// For a group of one rank.
std::vector<Bytes> orders_for_one(const LocalSavePlan& plan, const std::string& save_id,
                                  const Format& format) {
  std::vector<Dims> grids;
  if (format.needs_grid()) grids = plan_grids({&plan, 1})[0];
  Orders orders{save_id, Orders::Way::kExchange, plan_save_alone(plan)};
  orders.grids = std::move(grids);
  return {orders.encode()};
}

// Each rank writes what its cached plan says.
std::vector<Bytes> orders_as_before(size_t ranks, const std::string& save_id) {
  return std::vector<Bytes>(ranks, Orders{save_id, Orders::Way::kAsBefore}.encode());
}

void validate(const std::vector<PlanMessage>& messages) {
  std::vector<ByteView> plans;
  for (const PlanMessage& message : messages) plans.emplace_back(message.plan);
  check_access(plans);
}

}  // namespace

ExchangedOrders orders_by_exchange(std::vector<PlanMessage>& messages, const std::string& save_id,
                                   const Format& format, bool groups) {
  std::vector<std::vector<Dims>> grids(messages.size());
  if (format.needs_grid()) grids = grids_of(messages);
  SavePlanner planner(static_cast<int>(messages.size()));
  if (groups) planner.note_groups();
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const std::vector<int>& group = messages[rank].group;
    if (!group.empty()) planner.set_group(static_cast<int>(rank), group);
    planner.add_encoded(static_cast<int>(rank), messages[rank].plan);
    messages[rank].plan = Bytes();
  }
  std::vector<Assignment> assignments = planner.finish();
  std::vector<ContentGroups> of_ranks;
  if (groups) of_ranks = planner.content_groups();
  ExchangedOrders made{{}, planner.differing(), planner.contested()};
  for (size_t rank = 0; rank < assignments.size(); ++rank) {
    Orders orders{save_id, Orders::Way::kExchange, std::move(assignments[rank])};
    orders.grids = std::move(grids[rank]);
    if (groups) orders.groups = of_ranks[rank].encode();
    made.orders.push_back(orders.encode());
  }
  return made;
}

CoordinatorPlanning planning_of(std::vector<Bytes> messages) {
  agree_on_terms(messages);
  CoordinatorPlanning planning;
  for (Bytes& message : messages) {
    planning.messages.push_back(PlanMessage::decode(std::move(message)));
    merge_replica_names(planning.replicas, planning.messages.back().replicas);
  }
  planning.as_before = all_as_before(planning.messages);
  return planning;
}

bool needs_plans(const CoordinatorPlanning& planning) {
  return !planning.as_before &&
         std::any_of(planning.messages.begin(), planning.messages.end(),
                     [](const PlanMessage& message) { return !message.made_in.empty(); });
}

void add_plans(CoordinatorPlanning& planning, std::vector<Bytes> plans) {
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    if (!plans[rank].empty()) planning.messages[rank].plan = std::move(plans[rank]);
  }
  // Their plans have the contents. Earlier groups are not those of the new plan.
  for (PlanMessage& message : planning.messages) message.contents.clear();
}

std::vector<Bytes> make_orders(CoordinatorPlanning& planning, const SaveShare& own,
                               bool keeps_plans) {
  std::vector<PlanMessage>& messages = planning.messages;
  if (own.options.checks.access && !planning.as_before) validate(messages);
  planning.save_id = random_uuid();
  if (planning.as_before) {
    planning.orders = orders_as_before(messages.size(), planning.save_id);
  } else if (own.world_size == 1) {
    planning.orders = orders_for_one(own.local, planning.save_id, *own.format);
  } else {
    ExchangedOrders made = orders_by_exchange(messages, planning.save_id, *own.format, keeps_plans);
    planning.orders = std::move(made.orders);
    planning.differing = std::move(made.differing);
    planning.contested = std::move(made.contested);
  }
  if (!compares(own)) planning.contested.clear();
  planning.others = differing_ranks(messages);
  std::vector<Bytes> asked;
  for (const Question& question : questions_of(messages, planning.others, planning.contested)) {
    asked.push_back(question.encode());
  }
  return asked;
}

void add_replies(CoordinatorPlanning& planning, const std::vector<Bytes>& replies,
                 const SaveShare& own) {
  std::vector<Bytes> parts;
  std::vector<std::vector<ListLength>> lists;
  std::vector<std::vector<NamedContent>> contents;
  for (const Bytes& one : replies) {
    Reply reply = Reply::decode(one);
    parts.push_back(std::move(reply.parts));
    lists.push_back(std::move(reply.lists));
    contents.push_back(std::move(reply.contents));
  }
  expect_same_lengths(lists, own.items.common.has_value());
  const std::vector<int>& others = planning.others;
  if (!others.empty()) {
    tell_of_other_state(parts.front(), parts.at(static_cast<size_t>(others.front())), others,
                        own.options.checks.common_differs);
  }
  for (DifferingContent& one : differences_of(contents)) {
    planning.differing.push_back(std::move(one));
  }
  sort_by_key(planning.differing);
}

std::vector<Begun> make_answers(CoordinatorPlanning& planning, const SaveShare& own) {
  tell_of_differing(planning.differing, own.options.checks.common_differs, own.dialect->name());
  const size_t ranks = planning.messages.size();
  planning.messages.clear();
  auto lost = lost_of(planning.differing, ranks);
  std::vector<Begun> answers;
  for (size_t rank = 0; rank < ranks; ++rank) {
    answers.push_back({{}, std::move(lost[rank]), std::move(planning.orders[rank])});
  }
  return answers;
}

bool compares(const SaveShare& share) {
  return share.world_size > 1 && share.options.checks.common_differs != Checks::Differing::kIgnore;
}

}  // namespace tilestone::engine
