// The part of check_access() that concerns objects.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tilestone/geometry/box.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone {

// The parts of a grid object's key: "rng/shard_0.1_2.4" gives "rng" and {0, 1} of {2, 4}.
struct GridCell {
  std::string_view key;
  Dims offset;
  Dims shape;
};
// Returns nullopt for any other key, which names an independent object.
std::optional<GridCell> parse_grid_cell(std::string_view unique_key);

// The objects of all ranks, added rank by rank.
class AccessObjects {
 public:
  void add(const PlanObject& object, uint32_t rank);
  // The first rank that lists the key.
  std::optional<uint32_t> first_rank(const std::string& key) const;
  // Throws what check_access() throws about objects.
  void check();
  // The first rank that holds a cell of this key's grid. Valid after check().
  std::optional<uint32_t> first_rank_of_grid(const std::string& key) const;

 private:
  struct Object {
    uint32_t first_rank = 0;
    std::optional<uint32_t> main;
    bool common = false;
  };
  struct Grid {
    Dims shape;
    uint32_t rank = 0;  // the first rank with a cell of this grid
    std::map<Dims, const Object*> cells;
  };
  static void check_grid(std::string_view key, const Grid& grid);

  std::unordered_map<std::string, Object> objects_;
  std::map<std::string, Grid, std::less<>> grids_;
};

}  // namespace tilestone
