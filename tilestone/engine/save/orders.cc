#include "tilestone/engine/save/orders_internal.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/differing_internal.h"
#include "tilestone/engine/run/terms_internal.h"
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
std::vector<Orders> orders_for_one(const LocalSavePlan& plan, const std::string& save_id,
                                   const Format& format) {
  Orders orders{save_id, Orders::Way::kExchange, plan_save_alone(plan)};
  if (format.needs_grid()) orders.grids = std::move(plan_grids({&plan, 1})[0]);
  return {std::move(orders)};
}

// Whether all ranks have cached parts of the same plan.
bool all_as_before(const std::vector<PlanMessage>& messages) {
  const std::string& made_in = messages.front().made_in;
  return !made_in.empty() && std::ranges::all_of(messages, [&](const PlanMessage& other) {
    return other.made_in == made_in;
  });
}

void validate(const std::vector<PlanMessage>& messages) {
  std::vector<ByteView> plans;
  for (const PlanMessage& message : messages) plans.emplace_back(message.plan);
  check_access(plans);
}

// ---- What the ranks hold differently

// The groups whose ranks have sent different contents, ascending.
std::vector<uint64_t> differing_groups(const std::vector<PlanMessage>& messages) {
  std::map<uint64_t, uint64_t> first;
  std::vector<uint64_t> differing;
  for (const PlanMessage& message : messages) {
    for (const GroupContent& one : message.contents) {
      const auto [found, is_new] = first.emplace(one.group, one.content);
      if (!is_new && found->second != one.content) differing.push_back(one.group);
    }
  }
  std::sort(differing.begin(), differing.end());
  differing.erase(std::unique(differing.begin(), differing.end()), differing.end());
  return differing;
}

// One question for each rank; empty: there is nothing to ask. `others`: the ranks whose common
// state differs from rank 0's.
std::vector<Question> questions_of(const std::vector<PlanMessage>& messages,
                                   const std::vector<int>& others,
                                   const std::vector<ContestedChunk>& contested) {
  const bool lists = std::ranges::any_of(messages, [&](const PlanMessage& message) {
    return message.lists != messages.front().lists;
  });
  const int other = others.empty() ? -1 : others.front();
  const Question for_all{other, lists, differing_groups(messages), {}};
  if (for_all.other < 0 && !for_all.lists && for_all.groups.empty() && contested.empty()) return {};
  std::vector<Question> questions(messages.size(), for_all);
  for (const ContestedChunk& chunk : contested) {
    for (const ContestedChunk::Holder& holder : chunk.holders) {
      questions.at(static_cast<size_t>(holder.rank)).chunks.push_back(holder.chunk);
    }
  }
  return questions;
}

// The ranks whose common state is not rank 0's, ascending.
std::vector<int> differing_ranks(const std::vector<PlanMessage>& messages) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (messages[rank].common != messages.front().common) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

// Reports how the common state of the first rank in `ranks` differs from rank 0's: logs a warning,
// or throws Error(kMismatch) if `common_differs` is kError. The text names `ranks` and up to ten
// paths, with the values of both ranks there.
void tell_of_other_state(const std::vector<ContentPart>& of_0,
                         const std::vector<ContentPart>& of_other, const std::vector<int>& ranks,
                         Checks::Differing common_differs) {
  constexpr size_t kMaxNamedPaths = 10;
  const auto found = find_differences(of_0, of_other);
  const std::string other = "rank " + std::to_string(ranks.front());
  std::string text = "the common state of " + ranks_text(ranks) + " differs from that of rank 0: ";
  for (size_t i = 0; i < std::min(found.size(), kMaxNamedPaths); ++i) {
    text += (i == 0 ? "\"" : ", \"") + found[i].path + "\" (rank 0: " + found[i].a + "; " + other +
            ": " + found[i].b + ")";
  }
  if (found.size() > kMaxNamedPaths) {
    text += " and " + std::to_string(found.size() - kMaxNamedPaths) + " more";
  }
  if (found.empty()) text += "the difference has no path";
  if (common_differs == Checks::Differing::kError) {
    Error error(ErrorCode::kMismatch, text);
    if (!found.empty()) error.with_key(found.front().path);
    throw std::move(error).with_rank(ranks.front());
  }
  log(LogLevel::kWarning, text + "; the common state of rank 0 is saved");
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
    made.orders.push_back(std::move(orders));
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
    planning.orders.assign(messages.size(), {planning.save_id, Orders::Way::kAsBefore});
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
  std::vector<std::vector<ContentPart>> parts;
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

void end_planning(CoordinatorPlanning& planning, const SaveShare& own) {
  tell_of_differing(planning.differing, own.options.checks.common_differs, own.dialect->name());
  auto lost = lost_of(planning.differing, planning.messages.size());
  planning.messages.clear();
  for (size_t rank = 0; rank < lost.size(); ++rank)
    planning.orders[rank].lost = std::move(lost[rank]);
}

bool compares(const SaveShare& share) {
  return share.world_size > 1 && share.options.checks.common_differs != Checks::Differing::kIgnore;
}

}  // namespace tilestone::engine
