// What a session keeps, as the steps of its saves use it.
#pragma once

#include <memory>
#include <mutex>

#include "tilestone/engine/plan_cache_internal.h"
#include "tilestone/engine/run/kept_resources_internal.h"
#include "tilestone/engine/session.h"
#include "tilestone/engine/write/stage_internal.h"

namespace tilestone::engine {

// Shared by a session and the saves that it has on their way.
struct SessionParts {
  KeptResources resources;
  PlanCache plans;  // of the one save at a time that a communicator lets be planned

  // The session's staging memory where no other save has it, else memory that goes with the save.
  std::shared_ptr<StagingMemory> lend_memory();

  SessionStats stats() const;
  void count(const SessionStats& more);

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<StagingMemory> memory_ = std::make_shared<StagingMemory>();
  SessionStats stats_;
};

}  // namespace tilestone::engine
