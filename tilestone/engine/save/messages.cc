#include "tilestone/engine/save/messages_internal.h"

#include <utility>

namespace tilestone::engine {

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
  writer.blob(earlier);
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
  const ByteView earlier = reader.blob();
  decoded.earlier.assign(earlier.begin(), earlier.end());
  const ByteView plan = reader.raw(reader.remaining());
  decoded.plan.assign(plan.begin(), plan.end());
  return decoded;
}

Bytes Orders::encode() const {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(Answer::kOrders));
  writer.string(save_id);
  writer.string(staging_name);
  writer.varint(lost.size());
  for (const std::string& key : lost) writer.string(key);
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

Orders Orders::decode(ByteView answer) {
  ByteReader reader(answer, "orders of a save");
  reader.u8();
  Orders orders;
  orders.save_id = reader.string();
  orders.staging_name = reader.string();
  orders.lost.resize(reader.count());
  for (std::string& key : orders.lost) key = reader.string();
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

Answer kind_of(ByteView answer) {
  return static_cast<Answer>(ByteReader(answer, "an answer of the coordinator").u8());
}

Bytes ask_for_plan() { return Bytes(1, static_cast<std::byte>(Answer::kSendPlans)); }

Bytes Question::encode() const {
  ByteWriter out;
  out.u8(static_cast<uint8_t>(Answer::kCompare));
  out.varint(static_cast<uint64_t>(other + 1));
  out.u8(lists ? 1 : 0);
  out.varint(groups.size());
  for (const uint64_t group : groups) out.u64(group);
  out.varint(chunks.size());
  for (const uint32_t chunk : chunks) out.varint(chunk);
  return std::move(out).take();
}

Question Question::decode(ByteView answer) {
  ByteReader in(answer, "question of the coordinator");
  in.u8();
  Question question;
  question.other = static_cast<int>(in.varint()) - 1;
  question.lists = in.u8() != 0;
  question.groups.resize(in.count(sizeof(uint64_t)));
  for (uint64_t& group : question.groups) group = in.u64();
  question.chunks.resize(in.count());
  for (uint32_t& chunk : question.chunks) chunk = static_cast<uint32_t>(in.varint());
  in.expect_end();
  return question;
}

Bytes Reply::encode() const {
  ByteWriter out;
  out.varint(parts.size());
  for (const ContentPart& part : parts) {
    out.string(part.path);
    out.u64(part.hash);
    out.string(part.text);
  }
  write_lists(out, lists);
  out.varint(contents.size());
  for (const NamedContent& one : contents) {
    out.u64(one.held.id);
    out.u64(one.held.content);
    out.string(one.key);
    out.u8(static_cast<uint8_t>((one.is_saved ? 2 : 0) | (one.contested ? 1 : 0)));
  }
  return std::move(out).take();
}

Reply Reply::decode(ByteView bytes) {
  ByteReader in(bytes, "contents that a rank holds");
  Reply reply;
  reply.parts.resize(in.count(10));
  for (ContentPart& part : reply.parts) {
    part.path = in.string();
    part.hash = in.u64();
    part.text = in.string();
  }
  reply.lists = read_lists(in);
  reply.contents.resize(in.count(18));
  for (NamedContent& one : reply.contents) {
    one.held.id = in.u64();
    one.held.content = in.u64();
    one.key = in.string();
    const uint8_t flags = in.u8();
    one.is_saved = (flags & 2) != 0;
    one.contested = (flags & 1) != 0;
  }
  in.expect_end();
  return reply;
}

}  // namespace tilestone::engine
