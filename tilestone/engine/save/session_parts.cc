#include "tilestone/engine/save/session_parts_internal.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"

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

uint64_t structure_of(const SaveShare& share) {
  LocalSavePlan bare = share.local;
  for (PlanObject& object : bare.objects) object.content = 0;
  for (PlanChunk& chunk : bare.chunks) chunk.content = 0;
  ByteWriter writer;
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

std::shared_ptr<StagingMemory> SessionParts::lend_memory() {
  const std::lock_guard lock(lendable_->mutex);
  if (lendable_->lent) return std::make_shared<StagingMemory>();
  lendable_->lent = true;
  // Given back under the mutex, so that the next borrower sees all that this one did.
  return {&lendable_->memory, [lendable = lendable_](StagingMemory*) {
            const std::lock_guard back(lendable->mutex);
            lendable->lent = false;
          }};
}

void SessionParts::note_earlier_reported() {
  if (const auto earlier = std::exchange(earlier_, std::nullopt)) {
    const AfterEarlier after = consider({earlier->look()});
    if (after.warning) log(LogLevel::kWarning, *after.warning);
    static_cast<void>(earlier->durable->failure(true));
  }
  earlier_reported_ = true;
}

SessionStats SessionParts::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void SessionParts::count(const SessionStats& more) {
  const std::lock_guard lock(mutex_);
  stats_.saves += more.saves;
  stats_.plans_exchanged += more.plans_exchanged;
  stats_.plans_from_cache += more.plans_from_cache;
  stats_.plan_bytes_sent += more.plan_bytes_sent;
}

}  // namespace tilestone::engine
