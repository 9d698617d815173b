#include "tilestone/engine/orders_internal.h"

#include <utility>

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

}  // namespace

Bytes PlanMessage::encode() const {
  ByteWriter writer;
  writer.u64(common);
  writer.u64(lists);
  writer.string(made_in);
  writer.varint(contents.size());
  for (const GroupContent& one : contents) {
    writer.u64(one.group);
    writer.u64(one.content);
  }
  writer.varint(group.size());
  for (const int rank : group) writer.varint(static_cast<uint64_t>(rank));
  writer.varint(replicas.size());
  for (const auto& [key, rank] : replicas) {
    writer.string(key);
    writer.varint(rank);
  }
  writer.raw(plan);
  return std::move(writer).take();
}

PlanMessage PlanMessage::decode(Bytes message) {
  ByteReader reader(message, "the plan message of a rank");
  PlanMessage decoded;
  decoded.common = reader.u64();
  decoded.lists = reader.u64();
  decoded.made_in = reader.string();
  decoded.contents.resize(reader.count(2 * sizeof(uint64_t)));
  for (GroupContent& one : decoded.contents) {
    one.group = reader.u64();
    one.content = reader.u64();
  }
  for (uint64_t count = reader.count(); count > 0; --count) {
    decoded.group.push_back(static_cast<int>(reader.varint()));
  }
  for (uint64_t count = reader.count(2); count > 0; --count) {
    std::string key(reader.string());
    decoded.replicas.emplace(std::move(key), static_cast<uint32_t>(reader.varint()));
  }
  const ByteView plan = reader.raw(reader.remaining());
  decoded.plan.assign(plan.begin(), plan.end());
  return decoded;
}

Bytes Orders::encode() const {
  ByteWriter writer;
  writer.string(save_id);
  writer.u8(static_cast<uint8_t>(way));
  writer.varint(grids.size());
  for (const Dims& cell : grids) {
    writer.varint(cell.size());
    for (const int64_t extent : cell) writer.varint(static_cast<uint64_t>(extent));
  }
  writer.blob(groups);
  if (way == Way::kExchange) writer.raw(assignment.encode());
  return std::move(writer).take();
}

Orders Orders::decode(ByteView bytes) {
  ByteReader reader(bytes, "orders of a save");
  Orders orders;
  orders.save_id = reader.string();
  orders.way = static_cast<Way>(reader.u8());
  for (uint64_t count = reader.count(); count > 0; --count) {
    Dims& cell = orders.grids.emplace_back();
    for (uint64_t dims = reader.count(); dims > 0; --dims) {
      cell.push_back(static_cast<int64_t>(reader.varint()));
    }
  }
  const ByteView groups = reader.blob();
  orders.groups.assign(groups.begin(), groups.end());
  if (orders.way == Way::kExchange) {
    orders.assignment = Assignment::decode(reader.raw(reader.remaining()));
  }
  reader.expect_end();
  return orders;
}

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

std::vector<Bytes> orders_for_one(const LocalSavePlan& plan, const std::string& save_id,
                                  const Format& format) {
  std::vector<Dims> grids;
  if (format.needs_grid()) grids = plan_grids({&plan, 1})[0];
  Orders orders{save_id, Orders::Way::kExchange, plan_save_alone(plan)};
  orders.grids = std::move(grids);
  return {orders.encode()};
}

std::vector<Bytes> orders_as_before(size_t ranks, const std::string& save_id) {
  return std::vector<Bytes>(ranks, Orders{save_id, Orders::Way::kAsBefore}.encode());
}

}  // namespace tilestone::engine
