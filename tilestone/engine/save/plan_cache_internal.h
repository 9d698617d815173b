// Caches the plans of earlier saves. Who writes what depends only on the structure of the ranks'
// states, so a save of states with the structure of an earlier save need not plan again.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save/messages_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/plan/contents.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// What a rank keeps of one plan.
struct CachedPlan {
  uint64_t structure = 0;  // structure_of() the state that this rank saved
  // By exchange: the id of the save in which the plan was made. "" by rule. Ranks whose cached
  // plans have the same made_in hold parts of one plan, and each of them writes what it wrote then.
  std::string made_in;
  Assignment assignment;
  std::vector<Dims> grids;    // see Orders::grids
  ContentGroups groups = {};  // by exchange: with whom this rank compares what
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

// How the ranks decide who writes what: with a communicator by exchange, by files by rule.
enum class PlannedBy : uint8_t { kExchange, kRule };

// A hash of everything that this rank's part of a plan depends on: its local plan (without
// contents), its rank, whether contents are compared, the world size, and the relevant options.
// By rule a rank's part depends on nothing else, so a cached plan can be used without asking other
// ranks. Throws what replicate_group_of() throws.
uint64_t structure_of(const SaveShare& share, PlannedBy way);

// True if all ranks have cached parts of the same plan.
bool all_as_before(const std::vector<PlanMessage>& messages);

}  // namespace tilestone::engine
