#include "tilestone/geometry/placement.h"

#include <algorithm>
#include <numeric>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

[[noreturn]] void fail(const Dims& shape, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, "mesh of shape " + to_string(shape) + ": " + problem);
}

// Indices into `ranks`, sorted by rank. Throws unless the ranks are valid for a mesh of this shape.
std::vector<size_t> sorted_by_rank(const Dims& shape, const std::vector<int>& ranks) {
  const int64_t expected = numel(shape);
  if (static_cast<int64_t>(ranks.size()) != expected) {
    fail(shape,
         "expected " + std::to_string(expected) + " ranks, got " + std::to_string(ranks.size()));
  }
  std::vector<size_t> positions(ranks.size());
  std::iota(positions.begin(), positions.end(), size_t{0});
  std::sort(positions.begin(), positions.end(),
            [&](size_t a, size_t b) { return ranks[a] < ranks[b]; });
  const int first = ranks[positions.front()];
  if (first < 0) fail(shape, "rank " + std::to_string(first) + " is negative");
  const auto twice = std::adjacent_find(positions.begin(), positions.end(),
                                        [&](size_t a, size_t b) { return ranks[a] == ranks[b]; });
  if (twice != positions.end()) {
    fail(shape, "rank " + std::to_string(ranks[*twice]) + " appears twice");
  }
  return positions;
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
    if (n < 1) fail(shape_, "every dim must have a size of at least 1");
  }
  by_rank_ = sorted_by_rank(shape_, ranks_);
  check_names(shape_, names_);
}

Mesh Mesh::grid(Dims shape, std::vector<std::string> names) {
  std::vector<int> ranks = count_up(shape);
  return Mesh(std::move(shape), std::move(ranks), std::move(names));
}

std::optional<Dims> Mesh::coordinate(int rank) const {
  const auto found = std::lower_bound(by_rank_.begin(), by_rank_.end(), rank,
                                      [&](size_t position, int r) { return ranks_[position] < r; });
  if (found == by_rank_.end() || ranks_[*found] != rank) return std::nullopt;
  auto index = static_cast<int64_t>(*found);
  Dims at(dims(), 0);
  for (size_t d = dims(); d-- > 0;) {
    at[d] = index % shape_[d];
    index /= shape_[d];
  }
  return at;
}

int Mesh::rank_at(const Dims& coordinate) const {
  if (coordinate.size() != dims()) {
    fail(shape_, "coordinate " + to_string(coordinate) + " has " +
                     std::to_string(coordinate.size()) + " dims");
  }
  int64_t index = 0;
  for (size_t d = 0; d < dims(); ++d) {
    if (coordinate[d] < 0 || coordinate[d] >= shape_[d]) {
      fail(shape_, "coordinate " + to_string(coordinate) + " lies outside the mesh");
    }
    index = index * shape_[d] + coordinate[d];
  }
  return ranks_[static_cast<size_t>(index)];
}

}  // namespace tilestone
