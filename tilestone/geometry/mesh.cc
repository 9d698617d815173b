#include "tilestone/geometry/mesh.h"

#include <algorithm>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

[[noreturn]] void fail(const Dims& shape, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, "mesh of shape " + to_string(shape) + ": " + problem);
}

void check_ranks(const Dims& shape, const std::vector<int>& ranks) {
  const int64_t expected = numel(shape);
  if (static_cast<int64_t>(ranks.size()) != expected) {
    fail(shape,
         "expected " + std::to_string(expected) + " ranks, got " + std::to_string(ranks.size()));
  }
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0) fail(shape, "rank " + std::to_string(sorted.front()) + " is negative");
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail(shape, "rank " + std::to_string(*twice) + " appears twice");
}

void check_names(const Dims& shape, const std::vector<std::string>& names) {
  if (names.empty()) return;
  if (names.size() != shape.size()) {
    fail(shape, "expected " + std::to_string(shape.size()) + " dim names, got " +
                    std::to_string(names.size()));
  }
  std::vector<std::string> sorted = names;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front().empty()) fail(shape, "a dim name is empty");
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail(shape, "dim name '" + *twice + "' appears twice");
}

std::vector<int> count_up(const Dims& shape) {
  std::vector<int> ranks(static_cast<size_t>(numel(shape)));
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int>(i);
  return ranks;
}

}  // namespace

Mesh::Mesh(Dims shape, std::vector<int> ranks, std::vector<std::string> names)
    : shape_(std::move(shape)), ranks_(std::move(ranks)), names_(std::move(names)) {
  for (int64_t n : shape_) {
    if (n < 1) fail(shape_, "every dim must be at least 1 long");
  }
  check_ranks(shape_, ranks_);
  check_names(shape_, names_);
}

Mesh Mesh::grid(Dims shape, std::vector<std::string> names) {
  std::vector<int> ranks = count_up(shape);
  return Mesh(std::move(shape), std::move(ranks), std::move(names));
}

std::optional<size_t> Mesh::find_dim(std::string_view name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) return std::nullopt;
  return static_cast<size_t>(found - names_.begin());
}

std::optional<Dims> Mesh::coordinate(int rank) const {
  const auto found = std::find(ranks_.begin(), ranks_.end(), rank);
  if (found == ranks_.end()) return std::nullopt;
  int64_t index = found - ranks_.begin();
  Dims at(dims(), 0);
  for (size_t d = dims(); d-- > 0;) {
    at[d] = index % shape_[d];
    index /= shape_[d];
  }
  return at;
}

int Mesh::rank_at(const Dims& coordinate) const {
  if (coordinate.size() != dims()) {
    fail(shape_, "coordinate " + to_string(coordinate) + " has another number of dims");
  }
  int64_t index = 0;
  for (size_t d = 0; d < dims(); ++d) {
    if (coordinate[d] < 0 || coordinate[d] >= shape_[d]) {
      fail(shape_, "coordinate " + to_string(coordinate) + " lies outside");
    }
    index = index * shape_[d] + coordinate[d];
  }
  return ranks_[static_cast<size_t>(index)];
}

}  // namespace tilestone
