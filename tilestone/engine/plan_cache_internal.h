// Plans of earlier saves: who writes what depends on the structure of the ranks' states alone, so a
// save of states whose structure is that of an earlier one need not agree on it again.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "tilestone/engine/orders_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// What a rank has kept of a save.
struct CachedPlan {
  uint64_t structure = 0;  // structure_of() what this rank saved
  // By exchange, the save that it was made in; by rule "". Ranks whose cached plans have the same
  // one hold parts of one plan, and each of them saves what it saved then.
  std::string made_in;
  Assignment assignment;
  std::vector<Dims> grids;  // as Orders::grids
  // The ranks' common objects were not the same, so that where they are compared it takes the
  // plans.
  bool objects_differ = false;
};

// A rank's last plans, newest first.
class PlanCache {
 public:
  // Null: none of this structure.
  const CachedPlan* find(uint64_t structure) const;
  // Takes the place of one of the same structure.
  void put(CachedPlan plan);

 private:
  static constexpr size_t kMaxPlans = 8;  // a run saves states of few structures
  std::deque<CachedPlan> plans_;
};

// How the ranks of a save know who writes what.
enum class PlanWay : uint8_t { kExchange, kRule };

// Of all that a rank's part in such a plan depends on: its local plan, whose contents
// (PlanObject::content) are not looked at, its place in the world, and what the options say of it.
// By rule nothing else counts, so that a kept plan needs no word of other ranks. Errors: of
// replicate_group_of().
uint64_t structure_of(const LocalSavePlan& plan, PlanWay way, const SaveOptions& options,
                      const Format& format, const Dialect& dialect, int rank, int world_size);

// Of the contents of the plan's common objects by key, in whatever order they stand.
uint64_t contents_of(const LocalSavePlan& plan);

// Whether each rank saves what it saved when one and the same plan was made.
bool all_as_before(const std::vector<PlanMessage>& messages);
// Whether those that have sent no plan have the same contents.
bool same_contents(const std::vector<PlanMessage>& messages);

}  // namespace tilestone::engine
