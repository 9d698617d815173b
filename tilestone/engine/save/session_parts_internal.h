// The parts of a session that the steps of its saves use.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/engine/run/kept_resources_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save/in_flight_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/engine/write/stage_internal.h"
#include "tilestone/plan/contents.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// ---- Plans of earlier saves
//
// Who writes what depends only on the structure of the ranks' states, so ranks with a communicator
// that save states with the structure of an earlier save need not exchange their plans again.

// What a rank keeps of one plan.
struct CachedPlan {
  uint64_t structure = 0;  // structure_of() the state that this rank saved
  // The id of the save in which the plan was made. Ranks whose cached plans have the same made_in
  // hold parts of one plan, and each of them writes what it wrote then.
  std::string made_in;
  Assignment assignment;
  std::vector<Dims> grids;    // see Orders::grids
  ContentGroups groups = {};  // with whom this rank compares what
};

// A rank's latest plans, newest first.
class PlanCache {
 public:
  // Returns null if there is no plan of this structure.
  const CachedPlan* find(uint64_t structure) const;
  // Replaces the plan of the same structure, if there is one. Drops the oldest plan if there are
  // more than kMaxPlans.
  void put(CachedPlan plan);

 private:
  static constexpr size_t kMaxPlans = 8;  // a run saves states of few structures
  std::deque<CachedPlan> plans_;
};

// A hash of everything that this rank's part of a plan depends on: its local plan (without
// contents), its rank, whether contents are compared, the world size, and the relevant options.
// Throws what replicate_group_of() throws.
uint64_t structure_of(const SaveShare& share);

// ----

// Shared by a session and its saves in progress.
struct SessionParts {
  KeptResources resources;
  PlanCache plans;  // not locked: a session plans its saves one after another

  // Returns the session's staging memory if no other save uses it, else new memory that is freed
  // with the save.
  std::shared_ptr<StagingMemory> lend_memory();

  // The session's last asynchronous save; nullopt if there is none. Used by the session's thread,
  // which sets it before each save.
  const std::optional<EarlierSave>& earlier() const { return earlier_; }
  void set_earlier(std::optional<EarlierSave> earlier) { earlier_ = std::move(earlier); }
  // The ranks have heard of it. A failure that is only to be logged is logged now.
  void note_earlier_reported();
  // Whether they have, since the last call of this.
  bool take_earlier_reported() { return std::exchange(earlier_reported_, false); }

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
  std::optional<EarlierSave> earlier_;
  bool earlier_reported_ = false;
};

// Null if there is no session, or no such save of it.
inline const EarlierSave* earlier_of(const SessionParts* session) {
  return session != nullptr && session->earlier() ? &*session->earlier() : nullptr;
}

}  // namespace tilestone::engine
