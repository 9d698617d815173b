// The part of check_access() that concerns objects.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tilestone/geometry/dims.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone {

// The key of an object of a grid, taken apart: "rng/shard_0.1_2.4" is "rng", {0, 1} of {2, 4}.
struct GridPlace {
  std::string_view key;
  Dims offset;
  Dims shape;
};
// nullopt for a key of another form, which is an object of its own.
std::optional<GridPlace> parse_grid_place(std::string_view unique_key);

// All ranks' objects, added rank by rank.
class AccessObjects {
 public:
  void add(const PlanObject& object, uint32_t rank);
  std::optional<uint32_t> first_rank(const std::string& key) const;  // of those that list it
  // Errors as check_access().
  void check();
  // Of those that hold a place of the grid of this key; after check().
  std::optional<uint32_t> first_rank_of_grid(const std::string& key) const;

 private:
  struct Object {
    uint32_t first_rank = 0;
    std::optional<uint32_t> main;
    bool common = false;
  };
  struct Grid {
    Dims shape;
    uint32_t rank = 0;  // the first that has said so
    std::map<Dims, const Object*> places;
  };
  static void check_grid(std::string_view key, const Grid& grid);

  std::unordered_map<std::string, Object> objects_;
  std::map<std::string, Grid, std::less<>> grids_;
};

}  // namespace tilestone
