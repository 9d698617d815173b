#include "tilestone/engine/save/messages_internal.h"

#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone::engine {

namespace {

// As in base/both_ways.h.
void walk_plan_message(auto& io, auto& message) {
  both::u64(io, message.common);
  both::u64(io, message.lists);
  both::text(io, message.made_in);
  both::each(io, message.contents, 2 * sizeof(uint64_t), [&](auto& one) {
    both::u64(io, one.group);
    both::u64(io, one.content);
  });
  both::each(io, message.group, 1, [&](auto& rank) { both::varint(io, rank); });
  both::table(io, message.replicas, 2, [&](auto& rank) { both::varint(io, rank); });
  both::blob(io, message.earlier);
  both::tail(io, message.plan);
}

// All but the assignment.
void walk_orders(auto& io, auto& orders) {
  both::text(io, orders.save_id);
  both::text(io, orders.sibling);
  both::texts(io, orders.lost);
  both::u8(io, orders.way);
  both::each(io, orders.grids, 1, [&](auto& cell) { wire::shape(io, cell); });
  both::blob(io, orders.groups);
}

void walk_question(auto& io, auto& question) {
  both::i64(io, question.other);
  both::u8(io, question.lists);
  both::each(io, question.groups, sizeof(uint64_t), [&](auto& group) { both::u64(io, group); });
  both::each(io, question.chunks, 1, [&](auto& chunk) { both::varint(io, chunk); });
}

void walk_reply(auto& io, auto& reply) {
  both::each(io, reply.parts, 10, [&](auto& part) {
    both::text(io, part.path);
    both::u64(io, part.hash);
    both::text(io, part.text);
  });
  walk_lists(io, reply.lists);
  both::each(io, reply.contents, 18, [&](auto& one) {
    both::u64(io, one.held.id);
    both::u64(io, one.held.content);
    both::text(io, one.key);
    both::flags(io, one.contested, one.is_saved);
  });
}

}  // namespace

Bytes PlanMessage::encode() const {
  ByteWriter writer;
  walk_plan_message(writer, *this);
  return std::move(writer).take();
}

PlanMessage PlanMessage::decode(Bytes message) {
  ByteReader reader(message, "the plan message of a rank");
  PlanMessage decoded;
  walk_plan_message(reader, decoded);
  return decoded;
}

Bytes Orders::encode() const {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(Answer::kOrders));
  walk_orders(writer, *this);
  if (way == Way::kExchange) writer.raw(assignment.encode());
  return std::move(writer).take();
}

Orders Orders::decode(ByteView answer) {
  ByteReader reader(answer, "orders of a save");
  reader.u8();
  Orders orders;
  walk_orders(reader, orders);
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
  walk_question(out, *this);
  return std::move(out).take();
}

Question Question::decode(ByteView answer) {
  ByteReader in(answer, "question of the coordinator");
  in.u8();
  Question question;
  walk_question(in, question);
  in.expect_end();
  return question;
}

Bytes Reply::encode() const {
  ByteWriter out;
  walk_reply(out, *this);
  return std::move(out).take();
}

Reply Reply::decode(ByteView bytes) {
  ByteReader in(bytes, "contents that a rank holds");
  Reply reply;
  walk_reply(in, reply);
  in.expect_end();
  return reply;
}

}  // namespace tilestone::engine
