#include "tilestone/engine/save/session_parts_internal.h"

#include "tilestone/base/error.h"

namespace tilestone::engine {

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

Assignment SessionParts::planned_by_rule(uint64_t structure,
                                         const std::function<Assignment()>& plan) {
  if (const CachedPlan* const found = plans.find(structure)) {
    count({0, 0, 1, 0});
    return found->assignment;
  }
  Assignment mine = plan();
  plans.put({structure, "", mine, {}});
  return mine;
}

Assignment plan_by_rule(SessionParts* session, const SaveShare& share) {
  const auto plan = [&] {
    const std::vector<int> group = replicate_group_of(share);
    const bool all = group.size() == static_cast<size_t>(share.world_size);
    return plan_save_by_rule(share.local, share.rank, group, all);
  };
  if (session == nullptr) return plan();
  return session->planned_by_rule(structure_of(share, PlannedBy::kRule), plan);
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
