#include "tilestone/plan/contents.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone {
namespace {

uint64_t never_0(uint64_t hash) { return std::max<uint64_t>(hash, 1); }

uint64_t mixed(const HeldContent& held) {
  ByteWriter out;
  out.u64(held.id);
  out.u64(held.content);
  return xxh3_64(out.bytes());
}

void write_runs(ByteWriter& out, const std::vector<uint64_t>& groups) {
  for (size_t i = 0; i < groups.size();) {
    size_t end = i + 1;
    while (end < groups.size() && groups[end] == groups[i]) ++end;
    out.u64(groups[i]);
    out.varint(end - i);
    i = end;
  }
}

std::vector<uint64_t> read_runs(ByteReader& in, size_t count) {
  std::vector<uint64_t> groups;
  groups.reserve(count);
  while (groups.size() < count) {
    const uint64_t group = in.u64();
    const uint64_t run = in.varint();
    if (run == 0 || run > count - groups.size()) in.fail("a run of groups has another length");
    groups.insert(groups.end(), run, group);
  }
  return groups;
}

template <typename Visit>  // Visit(group, NamedContent)
void each_content(const LocalSavePlan& plan, const ContentGroups& groups, const Assignment& mine,
                  const Visit& visit) {
  const auto writes = [](const std::vector<uint32_t>& indices, size_t i) {
    return std::binary_search(indices.begin(), indices.end(), static_cast<uint32_t>(i));
  };
  for (size_t i = 0; i < plan.objects.size(); ++i) {
    const PlanObject& object = plan.objects[i];
    if (object.content == 0) continue;
    visit(i < groups.objects.size() ? groups.objects[i] : 0,
          NamedContent{
              {id_of(object.key), object.content}, object.key, writes(mine.objects, i), false});
  }
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const PlanChunk& chunk = plan.chunks[i];
    if (chunk.content == 0) continue;
    const PlanTensor& tensor = plan.tensors[chunk.tensor];
    visit(i < groups.chunks.size() ? groups.chunks[i] : 0,
          NamedContent{{id_of(tensor, chunk.box), chunk.content},
                       tensor.key,
                       writes(mine.chunks, i),
                       !is_compared(plan, chunk)});
  }
}

}  // namespace

bool is_compared(const LocalSavePlan& plan, const PlanChunk& chunk) {
  if (!chunk.common && chunk.holders != PlanChunk::kUnknown) return false;
  const auto elements = static_cast<uint64_t>(chunk.box.numel());
  const uint64_t size = itemsize(plan.tensors[chunk.tensor].dtype);
  return elements > 0 && elements <= kMaxComparedBytes / size;
}

uint64_t id_of(const PlanTensor& tensor, const Box& box) {
  ByteWriter out;
  out.string(tensor.key);
  wire::dtype(out, tensor.dtype);
  wire::shape(out, tensor.global_shape);
  wire::box(out, tensor.global_shape, box);
  return never_0(xxh3_64(out.bytes()));
}

uint64_t id_of(std::string_view object_key) {
  ByteWriter out;
  out.string("object");
  out.string(object_key);
  return never_0(xxh3_64(out.bytes()));
}

std::vector<HeldContent> held_contents(const LocalSavePlan& plan) {
  std::vector<HeldContent> held;
  for (const PlanObject& object : plan.objects) held.push_back({id_of(object.key), object.content});
  for (const PlanChunk& chunk : plan.chunks) {
    if (chunk.box.empty()) continue;
    const bool known = chunk.holders != PlanChunk::kUnknown;
    const size_t ranks = known ? plan.holder_sets[chunk.holders].size() : 0;
    held.push_back({id_of(plan.tensors[chunk.tensor], chunk.box), chunk.content,
                    ranks > 1 ? static_cast<uint32_t>(ranks) : 0});
  }
  std::sort(held.begin(), held.end());
  return held;
}

namespace {
constexpr uint8_t kGroupsVersion = 1;
}  // namespace

Bytes ContentGroups::encode() const {
  ByteWriter out;
  out.u8(kGroupsVersion);  // so that the groups of a rank that has nothing are not empty bytes
  write_runs(out, objects);
  write_runs(out, chunks);
  return std::move(out).take();
}

ContentGroups ContentGroups::decode(ByteView bytes, size_t objects, size_t chunks) {
  ByteReader in(bytes, "groups of ranks that compare contents");
  if (in.u8() != kGroupsVersion) in.fail("they have another version");
  ContentGroups groups;
  groups.objects = read_runs(in, objects);
  groups.chunks = read_runs(in, chunks);
  in.expect_end();
  return groups;
}

std::vector<GroupContent> contents_by_group(const LocalSavePlan& plan,
                                            const ContentGroups& groups) {
  std::map<uint64_t, uint64_t> sums;
  each_content(plan, groups, {}, [&](uint64_t group, const NamedContent& one) {
    if (group != 0) sums[group] += mixed(one.held);
  });
  std::vector<GroupContent> contents;
  for (const auto& [group, sum] : sums) contents.push_back({group, sum});
  return contents;
}

std::vector<NamedContent> named_contents(const LocalSavePlan& plan, const ContentGroups& groups,
                                         const std::vector<uint64_t>& asked,
                                         const std::vector<uint32_t>& chunks,
                                         const Assignment& mine) {
  std::vector<NamedContent> named;
  each_content(plan, groups, mine, [&](uint64_t group, NamedContent one) {
    if (std::binary_search(asked.begin(), asked.end(), group)) named.push_back(std::move(one));
  });
  for (const uint32_t i : chunks) {
    const PlanChunk& chunk = plan.chunks.at(i);
    const PlanTensor& tensor = plan.tensors[chunk.tensor];
    named.push_back({{id_of(tensor, chunk.box), chunk.content}, tensor.key, false, true});
  }
  return named;
}

std::vector<DifferingContent> differences_of(
    const std::vector<std::vector<NamedContent>>& by_rank) {
  struct Seen {
    const NamedContent* saved = nullptr;
    DifferingContent difference;
    std::vector<std::pair<int, uint64_t>> contents;  // by rank
  };
  std::map<uint64_t, Seen> seen;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const NamedContent& named : by_rank[rank]) {
      const auto number = static_cast<int>(rank);
      Seen& one = seen[named.held.id];
      if (one.saved == nullptr || (named.is_saved && !one.saved->is_saved)) {
        one.saved = &named;
        one.difference.saved = number;
      }
      one.difference.contested |= named.contested;
      one.contents.emplace_back(number, named.held.content);
    }
  }
  std::vector<DifferingContent> differing;
  for (auto& [id, one] : seen) {
    for (const auto& [rank, content] : one.contents) {
      if (content != one.saved->held.content) one.difference.others.push_back(rank);
    }
    if (one.difference.others.empty()) continue;
    one.difference.key = one.saved->key;
    differing.push_back(std::move(one.difference));
  }
  sort_by_key(differing);
  return differing;
}

void sort_by_key(std::vector<DifferingContent>& differing) {
  std::stable_sort(
      differing.begin(), differing.end(),
      [](const DifferingContent& a, const DifferingContent& b) { return a.key < b.key; });
}

}  // namespace tilestone
