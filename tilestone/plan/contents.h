// Which contents the ranks of a save compare, and in what form. Planning makes one of several ranks
// write what all of them hold, so what the others hold under that key is lost if it is different.
//
// Compared are objects, and chunks of at most kMaxComparedBytes that are common or whose holders
// are not declared: placements already say that their holders have the same. The rank whose version
// is saved is the main replica's for an object that is not common, otherwise the lowest rank that
// has it. So what belongs together (a counter, a random state, an order) comes from one rank.
//
// Chunks that ranks hold although the declared holders exclude it (DTensors of one key on disjoint
// meshes) are *contested*: either the meshes hold replicas, or other tensors have the same key.
// They are compared whatever their size.
//
// Ranks that should agree on something are its *group*. Contents change at every save although the
// plan does not, so with a plan of an earlier save each rank sends one hash for each of its groups.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone {

inline constexpr uint64_t kMaxComparedBytes = 64u << 10;

// Whether ranks compare this chunk when nobody contests it.
bool is_compared(const LocalSavePlan& plan, const PlanChunk& chunk);

// Identify what ranks hold. Never 0.
uint64_t id_of(const PlanTensor& tensor, const Box& box);
uint64_t id_of(std::string_view object_key);

// The content that a rank holds of something; 0: it is not compared.
struct HeldContent {
  uint64_t id = 0;
  uint64_t content = 0;
  uint32_t ranks = 0;  // how many ranks are declared to hold it; 0: none or only this one
  friend auto operator<=>(const HeldContent&, const HeldContent&) = default;
};
// What this rank holds: its objects, and its chunks with elements. Ascending by id.
std::vector<HeldContent> held_contents(const LocalSavePlan& plan);

// The groups of a rank's objects and chunks, by their index in its local plan. 0: no other rank has
// it, or it is not compared.
struct ContentGroups {
  std::vector<uint64_t> objects;
  std::vector<uint64_t> chunks;

  Bytes encode() const;  // in runs
  // Throws Error(kCorrupt) if the groups are not those of so many objects and chunks.
  static ContentGroups decode(ByteView bytes, size_t objects, size_t chunks);
};

// A hash of what a rank holds of one group.
struct GroupContent {
  uint64_t group = 0;
  uint64_t content = 0;
};
// One for each group, ascending. The order of the plan does not matter.
std::vector<GroupContent> contents_by_group(const LocalSavePlan& plan, const ContentGroups& groups);

// What a rank holds of one thing, with the key for messages.
struct NamedContent {
  HeldContent held;
  std::string key;
  bool is_saved = false;  // this rank writes it
  bool contested = false;
};
// This rank's objects and chunks of these groups (ascending), and these further chunks. `mine`:
// what it writes, as far as it is known.
std::vector<NamedContent> named_contents(const LocalSavePlan& plan, const ContentGroups& groups,
                                         const std::vector<uint64_t>& asked,
                                         const std::vector<uint32_t>& chunks,
                                         const Assignment& mine);

void sort_by_key(std::vector<DifferingContent>& differing);
// The differences among what the ranks hold, ordered by key. `by_rank`: of each rank. If it is not
// known which rank's version is saved, the lowest one's counts as that.
std::vector<DifferingContent> differences_of(const std::vector<std::vector<NamedContent>>& by_rank);

}  // namespace tilestone
