#include <algorithm>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/engine/save/plan_cache_internal.h"

namespace tilestone::engine {

const CachedPlan* PlanCache::find(uint64_t structure) const {
  const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const CachedPlan& plan) {
    return plan.structure == structure;
  });
  return found == plans_.end() ? nullptr : &*found;
}

void PlanCache::put(CachedPlan plan) {
  std::erase_if(plans_, [&](const CachedPlan& old) { return old.structure == plan.structure; });
  plans_.push_front(std::move(plan));
  if (plans_.size() > kMaxPlans) plans_.pop_back();
}

uint64_t structure_of(const SaveShare& share, PlannedBy way) {
  LocalSavePlan bare = share.local;
  for (PlanObject& object : bare.objects) object.content = 0;
  for (PlanChunk& chunk : bare.chunks) chunk.content = 0;
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(way));
  writer.u64(static_cast<uint64_t>(share.rank));
  writer.u64(static_cast<uint64_t>(share.world_size));
  writer.string(share.format->name());
  writer.string(share.dialect->name());
  writer.u8(share.options.checks.access ? 1 : 0);
  writer.u8(share.options.checks.common_differs == Checks::Differing::kIgnore ? 0 : 1);
  const std::vector<int> group = replicate_group_of(share);
  writer.varint(group.size());  // 0: this rank copies nothing
  for (const int other : group) writer.varint(static_cast<uint64_t>(other));
  writer.raw(bare.encode());
  return xxh3_64(writer.bytes());
}

bool all_as_before(const std::vector<PlanMessage>& messages) {
  const std::string& made_in = messages.front().made_in;
  return !made_in.empty() &&
         std::all_of(messages.begin(), messages.end(),
                     [&](const PlanMessage& other) { return other.made_in == made_in; });
}

}  // namespace tilestone::engine
