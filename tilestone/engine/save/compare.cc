#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "tilestone/engine/save/compare_internal.h"

namespace tilestone::engine {

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

Question Question::decode(ByteView bytes) {
  ByteReader in(bytes, "question of the coordinator");
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
  out.blob(parts);
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
  const ByteView parts = in.blob();
  reply.parts.assign(parts.begin(), parts.end());
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

bool lists_may_differ(const std::vector<PlanMessage>& messages) {
  return std::any_of(messages.begin(), messages.end(), [&](const PlanMessage& message) {
    return message.lists != messages.front().lists;
  });
}

std::vector<Question> questions_of(const std::vector<PlanMessage>& messages,
                                   const std::vector<int>& others,
                                   const std::vector<ContestedChunk>& contested) {
  const Question for_all{others.empty() ? -1 : others.front(),
                         lists_may_differ(messages),
                         differing_groups(messages),
                         {}};
  if (for_all.other < 0 && !for_all.lists && for_all.groups.empty() && contested.empty()) return {};
  std::vector<Question> questions(messages.size(), for_all);
  for (const ContestedChunk& chunk : contested) {
    for (const ContestedChunk::Holder& holder : chunk.holders) {
      questions.at(static_cast<size_t>(holder.rank)).chunks.push_back(holder.chunk);
    }
  }
  return questions;
}

}  // namespace tilestone::engine
