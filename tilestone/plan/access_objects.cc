#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/plan/access_objects_internal.h"
#include "tilestone/plan/texts_internal.h"

namespace tilestone {
namespace {

constexpr std::string_view kShard = "/shard_";
// Parses "0.1" as {0, 1}. Returns nullopt for any other text.
std::optional<Dims> parse_dims(std::string_view text) {
  Dims dims;
  const char* at = text.data();
  const char* const end = at + text.size();
  if (text.empty()) return dims;
  for (;;) {
    int64_t number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 0) return std::nullopt;
    dims.push_back(number);
    if (next == end) return dims;
    if (*next != '.') return std::nullopt;
    at = next + 1;
  }
}

// Advances to the next cell in C order. Returns false after the last one.
bool advance(Dims& cell, const Dims& shape) {
  for (size_t d = shape.size(); d-- > 0;) {
    if (++cell[d] < shape[d]) return true;
    cell[d] = 0;
  }
  return false;
}

}  // namespace

std::optional<GridCell> parse_grid_cell(std::string_view unique_key) {
  const size_t at = unique_key.rfind(kShard);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view numbers = unique_key.substr(at + kShard.size());
  const size_t bar = numbers.find('_');
  if (bar == std::string_view::npos) return std::nullopt;
  auto offset = parse_dims(numbers.substr(0, bar));
  auto shape = parse_dims(numbers.substr(bar + 1));
  if (!offset || !shape || offset->size() != shape->size()) return std::nullopt;
  return GridCell{unique_key.substr(0, at), *std::move(offset), *std::move(shape)};
}

void AccessObjects::add(const PlanObject& listed, uint32_t rank) {
  const auto [known, is_new] = objects_.try_emplace(listed.key);
  Object& object = known->second;
  if (is_new) object = {rank, std::nullopt, listed.common};
  if (object.common != listed.common) {
    throw Error(ErrorCode::kMismatch, rank_text(object.first_rank) + " and " + rank_text(rank) +
                                          " disagree on whether an object is common to all ranks")
        .with_key(listed.key);
  }
  if (listed.common || !listed.main_replica) return;
  if (object.main) {
    throw Error(ErrorCode::kCoverage,
                "Duplicate ShardedObject keys: " + listed.key +
                    (*object.main == rank
                         ? " is held twice as main replica by " + rank_text(rank)
                         : " is held by the main replicas of ranks " +
                               std::to_string(*object.main) + " and " + std::to_string(rank)))
        .with_key(listed.key);
  }
  object.main = rank;
}

std::optional<uint32_t> AccessObjects::first_rank(const std::string& key) const {
  const auto found = objects_.find(key);
  if (found == objects_.end()) return std::nullopt;
  return found->second.first_rank;
}

std::optional<uint32_t> AccessObjects::first_rank_of_grid(const std::string& key) const {
  const auto found = grids_.find(key);
  if (found == grids_.end()) return std::nullopt;
  return found->second.rank;
}

void AccessObjects::check() {
  std::map<std::string_view, const Object*> sorted;
  for (const auto& [key, object] : objects_) {
    if (!object.common) sorted.emplace(key, &object);
  }
  grids_.clear();
  for (const auto& [key, object] : sorted) {
    if (!object->main) {
      throw Error(ErrorCode::kCoverage,
                  std::string(kAccessPattern) +
                      "an object is held by no main replica; a replica of it is on " +
                      rank_text(object->first_rank))
          .with_key(std::string(key));
    }
    auto cell = parse_grid_cell(key);
    if (!cell) continue;
    const auto [grid, is_new] =
        grids_.try_emplace(std::string(cell->key), Grid{cell->shape, *object->main, {}});
    if (grid->second.shape != cell->shape) {
      throw Error(ErrorCode::kMismatch,
                  "ranks disagree on the grid of an object: " + rank_text(grid->second.rank) +
                      " has " + to_string(grid->second.shape) + ", " + rank_text(*object->main) +
                      " has " + to_string(cell->shape))
          .with_key(std::string(cell->key));
    }
    grid->second.cells.emplace(std::move(cell->offset), object);
  }
  for (const auto& [key, grid] : grids_) check_grid(key, grid);
}

// Looks for the cells one by one and stops at the first missing one, so a huge claimed grid costs
// nothing.
void AccessObjects::check_grid(std::string_view key, const Grid& grid) {
  for (const auto& [cell, object] : grid.cells) {
    for (size_t d = 0; d < cell.size(); ++d) {
      if (cell[d] < grid.shape[d]) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  kAccessPattern + rank_text(*object->main) + " holds the cell " + to_string(cell) +
                      " of an object whose grid is " + to_string(grid.shape))
          .with_key(std::string(key));
    }
  }
  Dims wanted(grid.shape.size(), 0);
  auto next = grid.cells.begin();
  for (bool more = true; more; more = advance(wanted, grid.shape)) {
    if (next != grid.cells.end() && next->first == wanted) {
      ++next;
      continue;
    }
    throw Error(ErrorCode::kCoverage,
                kAccessPattern + ("the cell " + to_string(wanted)) +
                    " of an object whose grid is " + to_string(grid.shape) +
                    " is held by no rank (cells held: " + std::to_string(grid.cells.size()) + ")")
        .with_key(std::string(key));
  }
}

}  // namespace tilestone
