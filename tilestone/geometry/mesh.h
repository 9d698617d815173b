// A device mesh: ranks in an n-dimensional grid with named dims, like torch's DeviceMesh.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tilestone/geometry/dims.h"

namespace tilestone {

class Mesh {
 public:
  // `ranks` has numel(shape) distinct global ranks in C order. Each dim has a size of at least 1.
  // `names` is empty or has a unique, non-empty name for each dim. Throws Error(kInvalidArgument)
  // otherwise.
  Mesh(Dims shape, std::vector<int> ranks, std::vector<std::string> names = {});
  // A mesh of the ranks 0 to numel(shape) - 1 in C order.
  static Mesh grid(Dims shape, std::vector<std::string> names = {});

  const Dims& shape() const { return shape_; }
  size_t dims() const { return shape_.size(); }
  const std::vector<int>& ranks() const { return ranks_; }
  const std::vector<std::string>& names() const { return names_; }

  // The coordinate of a global rank, or nullopt if the rank is not in the mesh.
  std::optional<Dims> coordinate(int rank) const;
  int rank_at(const Dims& coordinate) const;

  friend bool operator==(const Mesh&, const Mesh&) = default;

 private:
  Dims shape_;
  std::vector<int> ranks_;
  std::vector<std::string> names_;
  std::vector<size_t> by_rank_;  // indices into ranks_, sorted by rank for binary search
};

}  // namespace tilestone
