#include <algorithm>
#include <set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/orders_internal.h"
#include "tilestone/plan/grid_plan.h"

namespace tilestone::engine {
namespace {

void write_keys(ByteWriter& writer, const std::vector<std::string>& keys) {
  writer.varint(keys.size());
  for (const std::string& key : keys) writer.string(key);
}

std::vector<std::string> read_keys(ByteReader& reader) {
  std::vector<std::string> keys;
  for (uint64_t count = reader.count(); count > 0; --count) keys.emplace_back(reader.string());
  return keys;
}

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
  write_keys(writer, empties);
  writer.string(made_in);
  writer.u64(contents);
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
  decoded.empties = read_keys(reader);
  decoded.made_in = reader.string();
  decoded.contents = reader.u64();
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
  if (way == Way::kRule) write_keys(writer, empties);
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
  if (orders.way == Way::kRule) orders.empties = read_keys(reader);
  if (orders.way == Way::kExchange) {
    orders.assignment = Assignment::decode(reader.raw(reader.remaining()));
  }
  reader.expect_end();
  return orders;
}

std::vector<Bytes> orders_by_rule(const std::vector<PlanMessage>& messages,
                                  const std::string& save_id) {
  std::set<std::string> given;
  std::vector<Bytes> encoded;
  for (const PlanMessage& message : messages) {
    Orders orders{save_id, Orders::Way::kRule};
    for (const std::string& key : message.empties) {
      if (given.insert(key).second) orders.empties.push_back(key);
    }
    encoded.push_back(orders.encode());
  }
  return encoded;
}

std::vector<Bytes> orders_by_exchange(std::vector<PlanMessage>& messages,
                                      const std::string& save_id, const Format& format,
                                      SaveOptions::Differing differing) {
  std::vector<std::vector<Dims>> grids(messages.size());
  if (format.needs_grid()) grids = grids_of(messages);
  SavePlanner planner(static_cast<int>(messages.size()));
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const std::vector<int>& group = messages[rank].group;
    if (!group.empty()) planner.set_group(static_cast<int>(rank), group);
    planner.add_encoded(static_cast<int>(rank), messages[rank].plan);
    messages[rank].plan = Bytes();
  }
  std::vector<Bytes> orders;
  for (Assignment& assignment : planner.finish()) {
    std::vector<Dims>& cells = grids[orders.size()];
    orders.push_back(
        Orders{save_id, Orders::Way::kExchange, std::move(assignment), {}, std::move(cells)}
            .encode());
  }
  tell_of_differing(planner.differing_objects(), differing);
  return orders;
}

std::vector<Bytes> orders_for_one(const LocalSavePlan& plan, const std::string& save_id,
                                  const Format& format) {
  std::vector<Dims> grids;
  if (format.needs_grid()) grids = plan_grids({&plan, 1})[0];
  return {Orders{save_id, Orders::Way::kExchange, plan_save_alone(plan), {}, std::move(grids)}
              .encode()};
}

std::vector<Bytes> orders_as_before(size_t ranks, const std::string& save_id) {
  return std::vector<Bytes>(ranks, Orders{save_id, Orders::Way::kAsBefore}.encode());
}

void tell_of_differing(const std::vector<DifferingObject>& differing,
                       SaveOptions::Differing common_differs) {
  if (differing.empty() || common_differs == SaveOptions::Differing::kIgnore) return;
  constexpr size_t kMaxNamed = 10;
  std::string keys;
  for (size_t i = 0; i < std::min(differing.size(), kMaxNamed); ++i) {
    const DifferingObject& object = differing[i];
    keys += (i == 0 ? "\"" : ", \"") + object.key + "\" (ranks " + std::to_string(object.rank) +
            " and " + std::to_string(object.other) + " differ)";
  }
  if (differing.size() > kMaxNamed) {
    keys += " and " + std::to_string(differing.size() - kMaxNamed) + " more";
  }
  const std::string hint = "give values that differ between ranks a different key on each rank";
  if (common_differs == SaveOptions::Differing::kError) {
    throw Error(ErrorCode::kMismatch, "values or objects are not the same on all ranks: " + keys)
        .with_key(differing.front().key)
        .with_hint(hint);
  }
  log_once(
      LogLevel::kWarning,
      "values or objects are not the same on all ranks, and those of the lowest rank are saved: " +
          keys + "; " + hint);
}

}  // namespace tilestone::engine
