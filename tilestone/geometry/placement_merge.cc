#include <optional>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/geometry/placement.h"

namespace tilestone {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "merging placements: " + message);
}

bool is_replicate(const Placement& placement) {
  return std::holds_alternative<Replicate>(placement);
}

// The tensor dim that a placement splits, counted from the front; nullopt for Replicate.
std::optional<size_t> shard_dim(const Placement& placement, size_t rank) {
  int64_t dim = 0;
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    dim = shard->dim;
  } else if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    dim = strided->dim;
  } else {
    return std::nullopt;
  }
  const auto dims = static_cast<int64_t>(rank);
  if (dim < -dims || dim >= dims) {
    fail(to_string(placement) + " names a dim that a tensor of " + std::to_string(rank) +
         " dims does not have");
  }
  return static_cast<size_t>(dim < 0 ? dim + dims : dim);
}

struct Side {
  const Sharding& sharding;
  const Dims& coordinate;
};

// The mesh dim of `other` that is mesh dim m of `one`: by name, or by position in equal meshes.
std::optional<size_t> same_axis(const Mesh& one, size_t m, const Mesh& other) {
  if (one == other) return m;
  if (one.names().empty()) return std::nullopt;
  return other.find_dim(one.names()[m]);
}

// Whether the parameter's own sharding already spans the checkpoint's mesh dim m.
bool spanned_by_param(const Side& checkpoint, size_t m, const Side& param, size_t rank) {
  const Mesh& mesh = checkpoint.sharding.mesh;
  const auto axis = same_axis(mesh, m, param.sharding.mesh);
  if (!axis) return false;
  const std::string name =
      "mesh dim " + (mesh.names().empty() ? std::to_string(m) : "'" + mesh.names()[m] + "'");
  if (param.sharding.mesh.shape()[*axis] != mesh.shape()[m] ||
      param.coordinate[*axis] != checkpoint.coordinate[m]) {
    fail(name + " differs in size or coordinate between the parameter's mesh and the checkpoint's");
  }
  const Placement& own = param.sharding.placements[*axis];
  const Placement& wanted = checkpoint.sharding.placements[m];
  if (is_replicate(own)) return false;
  if (!is_replicate(wanted) && shard_dim(own, rank) != shard_dim(wanted, rank)) {
    fail("over " + name + " the parameter is " + to_string(own) + " but the checkpoint is " +
         to_string(wanted));
  }
  return true;
}

void check_placements(const Sharding& sharding, const Dims& coordinate) {
  if (sharding.placements.size() != sharding.mesh.dims()) {
    fail("expected one placement for each of the " + std::to_string(sharding.mesh.dims()) +
         " mesh dims, got " + std::to_string(sharding.placements.size()));
  }
  sharding.mesh.rank_at(coordinate);  // throws on a coordinate outside the mesh
}

// Places the parameter's boxes, which lie in a tensor of merged.global_shape, as shard `rank` of
// `fragments` along each dim.
void scale(MergedSharding& merged, const Dims& ranks, const Dims& fragments) {
  for (size_t d = 0; d < ranks.size(); ++d) {
    const int64_t shard = merged.global_shape[d];
    merged.global_shape[d] = checked_mul(shard, fragments[d], "merged global shape");
    for (Box& box : merged.held.boxes) box.offset[d] += ranks[d] * shard;
  }
}

}  // namespace

MergedSharding merge_shardings(const Dims& param_local_shape, const Dims& param_global_shape,
                               const Sharding& param, const Dims& param_coordinate,
                               const Sharding& checkpoint, const Dims& checkpoint_coordinate) {
  check_placements(checkpoint, checkpoint_coordinate);
  const size_t rank = param_global_shape.size();
  MergedSharding merged;
  merged.global_shape = param_global_shape;
  merged.held = held_boxes(param_global_shape, param.mesh, param_coordinate, param.placements,
                           param_local_shape);

  const Side own{param, param_coordinate};
  const Side rules{checkpoint, checkpoint_coordinate};
  Dims ranks(rank, 0);
  Dims fragments(rank, 1);
  for (size_t m = 0; m < checkpoint.mesh.dims(); ++m) {
    const Placement& placement = checkpoint.placements[m];
    if (!is_replicate(placement) && !std::holds_alternative<Shard>(placement)) {
      fail("a checkpoint placement must be Shard or Replicate, not " + to_string(placement));
    }
    const auto dim = shard_dim(placement, rank);
    if (spanned_by_param(rules, m, own, rank)) continue;
    if (!dim) {
      merged.replica_id.push_back(checkpoint_coordinate[m]);
      continue;
    }
    const int64_t size = checkpoint.mesh.shape()[m];
    ranks[*dim] = ranks[*dim] * size + checkpoint_coordinate[m];
    fragments[*dim] = checked_mul(fragments[*dim], size, "fragments");
  }
  for (size_t m = 0; m < param.mesh.dims(); ++m) {
    if (is_replicate(param.placements[m]) && !same_axis(param.mesh, m, checkpoint.mesh)) {
      merged.replica_id.push_back(param_coordinate[m]);
    }
  }
  scale(merged, ranks, fragments);
  numel(merged.global_shape);  // throws on overflow
  merged.strides = contiguous_strides(merged.global_shape);
  return merged;
}

}  // namespace tilestone
