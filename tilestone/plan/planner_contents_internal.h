// What SavePlanner finds out about the contents that ranks compare: see contents.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilestone/plan/contents.h"
#include "tilestone/plan/planner_internal.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::planner {

// A rank that holds an object.
struct ObjectHolder {
  uint32_t rank = 0;
  uint32_t index = 0;  // index into the rank's plan
  uint64_t content = 0;
};

class Contents {
 public:
  explicit Contents(size_t world) : chunks_(world), groups_(world) {}

  // ---- While ranks are added
  void add_chunk(uint32_t rank, uint32_t index, uint64_t content);
  void end_rank(uint32_t rank, size_t objects, size_t chunks);
  void note_groups() { notes_groups_ = true; }

  // ---- While chunks and objects are assigned. `group`: the listings of one box, by rank.
  // Whether all of its ranks have sent the chunk's content.
  bool are_known(std::span<const Listing> group) const;
  void compare(const std::string& key, std::span<const Listing> group);
  void contest(std::span<const Listing> of_sets);  // one listing for each set of declared holders
  // Holders by rank, all with known contents.
  void compare(const std::string& key, uint32_t writer, std::span<const ObjectHolder> holders);

  // ---- Results
  const std::vector<DifferingContent>& differing();
  const std::vector<ContestedChunk>& contested() const { return contested_; }
  std::vector<ContentGroups> groups();

 private:
  uint64_t of(const Listing& listing) const;
  void note_group(std::span<const Listing> group);

  bool notes_groups_ = false;
  bool sorted_ = false;
  // By rank and chunk; a rank's list ends after the last chunk whose content is known.
  std::vector<std::vector<uint64_t>> chunks_;
  std::vector<DifferingContent> differing_;
  std::vector<ContestedChunk> contested_;
  std::vector<ContentGroups> groups_;  // by rank; sizes as in its plan
};

}  // namespace tilestone::planner
