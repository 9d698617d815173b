// What a session keeps, as the steps of its saves use it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "tilestone/engine/coordination_internal.h"
#include "tilestone/engine/plan_cache_internal.h"
#include "tilestone/engine/run/kept_resources_internal.h"
#include "tilestone/engine/session.h"
#include "tilestone/engine/write/stage_internal.h"

namespace tilestone::engine {

// Shared by a session and the saves that it has on their way.
struct SessionParts {
  KeptResources resources;
  PlanCache plans;  // the saves of a session are planned one after the other

  // The session's staging memory where no other save has it, else memory that goes with the save.
  std::shared_ptr<StagingMemory> lend_memory();

  // The part of a plan by rule that a save of this structure (structure_of) had before, else what
  // `plan` gives, which is kept. Errors: of `plan`.
  Assignment planned_by_rule(uint64_t structure, const std::function<Assignment()>& plan);

  SessionStats stats() const;
  void count(const SessionStats& more);

 private:
  mutable std::mutex mutex_;
  struct Lendable {
    std::mutex mutex;
    bool lent = false;
    StagingMemory memory;  // of the borrower while lent
  };
  std::shared_ptr<Lendable> lendable_ = std::make_shared<Lendable>();  // a save may outlive it
  SessionStats stats_;
};

// What this rank writes by rule, of share.local; without a session (null) it is planned each time.
Assignment plan_by_rule(SessionParts* session, const SaveShare& share);

}  // namespace tilestone::engine
