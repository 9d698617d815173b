// A device mesh: ranks in a named n-dimensional grid, as torch's DeviceMesh.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/geometry/dims.h"

namespace tilestone {

class Mesh {
 public:
  // `ranks` holds numel(shape) distinct global ranks in C order, each dim at least 1 long; `names`
  // is empty or has a unique, non-empty name for each dim.
  // Throws Error(kInvalidArgument) otherwise.
  Mesh(Dims shape, std::vector<int> ranks, std::vector<std::string> names = {});
  // Ranks 0 ... numel(shape) - 1 in C order.
  static Mesh grid(Dims shape, std::vector<std::string> names = {});

  const Dims& shape() const { return shape_; }
  size_t dims() const { return shape_.size(); }
  const std::vector<int>& ranks() const { return ranks_; }
  const std::vector<std::string>& names() const { return names_; }
  std::optional<size_t> find_dim(std::string_view name) const;

  // Where a global rank sits in the mesh; nullopt for a rank outside it.
  std::optional<Dims> coordinate(int rank) const;
  int rank_at(const Dims& coordinate) const;

  friend bool operator==(const Mesh&, const Mesh&) = default;

 private:
  Dims shape_;
  std::vector<int> ranks_;
  std::vector<std::string> names_;
  std::vector<size_t> by_rank_;  // places in ranks_, ascending by rank: a look-up is a bisection
};

}  // namespace tilestone
