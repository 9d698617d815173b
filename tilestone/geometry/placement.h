// Placements describe how a tensor is distributed over a mesh: one placement per mesh dim, as in
// torch's DTensor. The global shape, mesh, coordinate and placements determine which boxes a rank
// holds, which replica it is, and which ranks hold the same. So planning needs arithmetic instead
// of communication.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tilestone/geometry/box.h"

namespace tilestone {

// A device mesh: ranks in an n-dimensional grid with named dims, like torch's DeviceMesh.

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

// Splits tensor dim `dim` (negative counts from the end) as torch.chunk does: each chunk has ceil(n
// / ranks) elements, but the last chunks may be shorter or empty.
struct Shard {
  int64_t dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};
// torch's _StridedShard, which FSDP2 over tensor parallelism uses: mesh dims further right first
// cut the dim into `split` parts, and this mesh dim then cuts each part into its shards.
struct StridedShard {
  int64_t dim = 0;
  int64_t split = 1;
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};
// A sum (or another reduction) that has not been computed yet. Can't be saved.
struct Partial {
  friend bool operator==(const Partial&, const Partial&) = default;
};
using Placement = std::variant<Shard, StridedShard, Replicate, Partial>;

std::string to_string(const Placement& placement);  // "Shard(0)", "StridedShard(0, 2)", ...

// The part of a tensor that one rank holds.
struct LocalBoxes {
  Dims local_shape;        // the shape of the local tensor
  std::vector<Box> boxes;  // its boxes in the global tensor
  // locals[i] is the box of the local tensor that holds boxes[i]; both lists have the same length.
  // Usually there is one box, which is the whole local tensor. A StridedShard may give several.
  std::vector<Box> locals;
};

// The boxes that the rank at `coordinate` holds. An empty shard gives one empty box with the local
// shape. As in torch, it begins at the end of each dim of which nothing is held. Throws
// Error(kInvalidArgument) on Partial, on a dim out of range, and if placements.size() !=
// mesh.dims().
LocalBoxes local_boxes(const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
                       std::span<const Placement> placements);

// The same for a rank whose local tensor has `local_shape`, which must match the placements. The
// shape is needed for FSDP2 over tensor parallelism: it cuts a dim by the inner mesh dims first and
// describes this with a StridedShard. Where a split is uneven, torch's outer-to-inner reading of
// the placements (local_boxes) does not give what FSDP2 cut. This function uses the reading that
// gives the local shape. Throws Error(kUnsupported) if both readings give this shape but different
// elements, Error(kInvalidArgument) if neither gives it, and what local_boxes throws.
LocalBoxes held_boxes(const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
                      std::span<const Placement> placements, const Dims& local_shape);

// The rank's coordinate along the Replicate dims only, outer to inner. The main replica has all
// zeros.
Dims replica_id(const Mesh& mesh, const Dims& coordinate, std::span<const Placement> placements);

// The global ranks that hold the same boxes as `coordinate`, ascending. Includes the rank at
// `coordinate` itself.
std::vector<int> replica_holders(const Mesh& mesh, const Dims& coordinate,
                                 std::span<const Placement> placements);

// A tensor's mesh and placements.
struct Sharding {
  Mesh mesh;
  std::vector<Placement> placements;
};

// A parameter's own sharding, merged with the sharding that the checkpoint specifies for it. With
// expert parallelism, each expert-parallel rank's parameter (for example an FSDP2 DTensor over the
// expert-data mesh) only describes its own experts. Its global shape is one shard of the tensor in
// the checkpoint, and its own placements would treat different experts as the same.
struct MergedSharding {
  Dims global_shape;  // shape of the tensor in the checkpoint
  Dims strides;       // contiguous, in elements
  LocalBoxes held;    // the part that the rank holds
  // Identifies the replica: of the ranks that hold the same boxes, exactly one has all zeros. The
  // first number says which copy of the parameter this is among those that the checkpoint's mesh
  // contains. The other numbers are the places along the parameter's own Replicate dims.
  Dims replica_id;
  // The ranks that hold the same boxes, ascending, including this rank. All ranks, for a tensor
  // without elements. Empty if the two meshes do not determine the holders: if copies lie along a
  // mesh dim of the parameter that the checkpoint's mesh does not have as well as along a dim of
  // the checkpoint that the parameter's mesh does not have, or if a mesh dim crosses the other mesh
  // without lying inside it.
  std::vector<int> holders;
};
// Returns the part of the checkpoint's tensor that `rank` holds. The rank must be in both meshes.
// `param` is the parameter's own sharding: for a plain tensor, Mesh({}, {rank}) without placements.
// Every rank that holds the tensor must be in the checkpoint's mesh or, failing that, in the
// parameter's mesh. A pipeline dim belongs in neither mesh, unless its stages hold the same
// parameter.
//
// Outer and inner. A Shard(d) of the checkpoint is outer if the parameter treats its ranks as
// replicas or does not know them. The parameter's own shards always lie inside the checkpoint's
// outer shards, whatever the order of the dims in the checkpoint's mesh. The outer shards of each
// tensor dim d are numbered over their mesh dims from outer to inner: rank = rank * size +
// coordinate and fragments *= size. The tensor's dim is `fragments` times the parameter's dim, and
// the parameter's boxes are shifted by `rank` times the parameter's dim. For example, with a mesh
// [edp, ep], expert-parallel rank 1 holds the second half of the experts, divided over edp.
//
// Which dims match. Ranks are compared, never names. A mesh dim stands for the line of ranks
// through this rank along that dim. The other mesh knows the dim if it contains these ranks, along
// one of its own dims or along several (a flattened dim).
//  - A Shard(d) over ranks among which the parameter already splits dim d counts once.
//  - A Shard over ranks that the parameter treats as replicas: the checkpoint decides, and only the
//    ranks within its shard remain replicas.
//  - A Replicate does not change which elements a rank holds. Over ranks that the parameter
//    distinguishes, the parameter decides. Over other ranks, it makes them copies.
// If all placements of the checkpoint are Replicate, the parameter's sharding stays as it is,
// including empty local shards.
//
// Throws Error(kInvalidArgument) if `rank` is not in both meshes, on StridedShard or Partial in the
// checkpoint's placements, and if the two shardings contradict each other: they split different
// dims over the same ranks, or the parameter splits over ranks of which some are in another shard
// of the checkpoint. Also throws what held_boxes throws.
MergedSharding merge_shardings(const Dims& param_local_shape, const Dims& param_global_shape,
                               const Sharding& param, const Sharding& checkpoint, int rank);

// A rule that gives placements to the parameters that its pattern matches. A pattern is a dotted
// path whose components are literal, "*" (any one component) or "**" (any number of components,
// including none). It matches a name if it matches a sequence of whole components of the name:
// "head" matches "head.weight" and "model.head.weight", but not "hc_head.weight".
struct PlacementRule {
  std::string pattern;
  std::vector<Placement> placements;
};
// Returns the index of the most specific rule that matches, or -1 if none does. Of two patterns,
// the one with more literal components is more specific ("hc_head.*" and "head" have one each). If
// they have equally many, it is the one with more "*" ("hc_head.*"), and then the one with fewer
// "**". The order of the rules does not matter. Throws Error(kInvalidArgument), with the name and
// both patterns, if two rules are equally specific.
int find_rule(std::span<const PlacementRule> rules, std::string_view name);

}  // namespace tilestone
