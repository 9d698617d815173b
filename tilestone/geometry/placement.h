// Placements: how a tensor is laid over a mesh, one placement per mesh dim, as torch's DTensor.
// From (global shape, mesh, coordinate, placements) follow the boxes a rank holds, which replica
// of them it is and who holds the same: planning is arithmetic, not conversation.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tilestone/geometry/box.h"
#include "tilestone/geometry/mesh.h"

namespace tilestone {

// Split along tensor dim `dim` (negative counts from the end) with torch.chunk semantics: chunks
// of ceil(n / ranks), the last ones shorter or empty.
struct Shard {
  int64_t dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};
// torch's _StridedShard: the dim is first cut into `split` parts by mesh dims further right, and
// each part into this mesh dim's shards (FSDP2 over TP).
struct StridedShard {
  int64_t dim = 0;
  int64_t split = 1;
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};
// A sum (or other reduction) that is still to be made; it can't be saved.
struct Partial {
  friend bool operator==(const Partial&, const Partial&) = default;
};
using Placement = std::variant<Shard, StridedShard, Replicate, Partial>;

std::string to_string(const Placement& placement);  // "Shard(0)", "StridedShard(0, 2)", ...

// What one rank holds of a tensor.
struct LocalBoxes {
  Dims local_shape;        // shape of the local tensor
  std::vector<Box> boxes;  // its boxes in the global tensor
  // locals[i] is the box of the local tensor that holds boxes[i]; one entry per box. One box that
  // is the whole local tensor in the ordinary case, several under a lone StridedShard.
  std::vector<Box> locals;
};

// The boxes at `coordinate` of the mesh. An empty shard gives one empty box of the local shape,
// which begins at the end of a dim of which nothing is held, as torch describes it. Throws
// Error(kInvalidArgument) on Partial, a dim out of range, or placements.size() != mesh.dims().
LocalBoxes local_boxes(const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
                       std::span<const Placement> placements);

// The same for a rank whose local tensor really has `local_shape`, which must be what the
// placements give. One case needs it: FSDP2 over tensor parallelism cuts a dim inner mesh dims
// first and then says so with a StridedShard, but where a split is uneven torch's outer-to-inner
// reading of the placements (local_boxes) is not what that gave. The reading that gives the local
// shape is taken. Throws Error(kUnsupported) where both readings give it but other elements,
// Error(kInvalidArgument) where none does, and as local_boxes does.
LocalBoxes held_boxes(const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
                      std::span<const Placement> placements, const Dims& local_shape);

// The coordinate along the Replicate dims only, outer to inner: all zeros for the main replica.
Dims replica_id(const Mesh& mesh, const Dims& coordinate, std::span<const Placement> placements);

// Global ranks that hold the same boxes as `coordinate` (itself included), ascending.
std::vector<int> replica_holders(const Mesh& mesh, const Dims& coordinate,
                                 std::span<const Placement> placements);

// A tensor's mesh and placements.
struct Sharding {
  Mesh mesh;
  std::vector<Placement> placements;
};

// A parameter's own sharding, merged with the one that the checkpoint gives it. With expert
// parallelism each expert-parallel rank's parameter (an FSDP2 DTensor over the expert-data mesh,
// say) only knows its own experts: its global shape is one shard of the tensor that the checkpoint
// holds, and its own placements would call different experts the same.
struct MergedSharding {
  Dims global_shape;  // of the tensor in the checkpoint
  Dims strides;       // contiguous, elements
  LocalBoxes held;    // what the rank holds of it
  // Of the ranks that hold the same, exactly one has all zeros. First which copy of the parameter
  // this is among those that the checkpoint's mesh knows of, then the places along the
  // parameter's own Replicate dims.
  Dims replica_id;
  // The ranks that hold the same, ascending, the rank itself included; of a tensor without elements
  // all ranks. Empty where the two meshes don't say: where copies are both along a mesh dim of the
  // parameter and along one of the checkpoint that the other mesh does not have, or where a mesh
  // dim crosses the other mesh without lying inside it.
  std::vector<int> holders;
};
// What `rank`, which is in both meshes, holds of the checkpoint's tensor. `param` is the
// parameter's own sharding; of a plain tensor, Mesh({}, {rank}) without placements. The
// checkpoint's mesh has all ranks that hold the tensor, or the parameter's mesh has the others. A
// pipeline dim belongs into neither, unless its stages hold the same parameter.
//
// Outer and inner. A Shard(d) of the checkpoint over ranks that the parameter takes for equal, or
// does not know, lies outside of the parameter's sharding. Along each tensor dim d, over these
// mesh dims from outer to inner, rank = rank * size + coordinate and fragments *= size; the
// tensor's dim is fragments times the parameter's, and the parameter's boxes are shifted by rank
// times its dim. So the parameter's own shards lie inside of the checkpoint's, whatever the order
// of the dims in the checkpoint's mesh is: with a mesh [edp, ep], expert-parallel rank 1 holds the
// second half of the experts, cut in pieces over edp.
//
// Which dims match. What is compared is ranks, never names: a mesh dim is the line of ranks through
// this one, and it is known to the other mesh where those ranks are in it, along one of its dims
// or several (a flattened one).
//  - A Shard(d) over ranks among which the parameter splits dim d already counts once.
//  - A Shard over ranks that the parameter takes for replicas: the checkpoint is right, and only
//    the replicas within its shard remain.
//  - A Replicate changes nothing of what is held: over ranks that the parameter tells apart, the
//    parameter is right; over others it makes them copies.
// If all are Replicate, the parameter's sharding stays as it is, an empty local shard included.
//
// Throws Error(kInvalidArgument) when `rank` is in one mesh only, when the two contradict one
// another (they split different dims over the same ranks; the parameter splits over ranks of which
// some are in another shard of the checkpoint), on StridedShard or Partial in the checkpoint's
// placements, and as held_boxes does.
MergedSharding merge_shardings(const Dims& param_local_shape, const Dims& param_global_shape,
                               const Sharding& param, const Sharding& checkpoint, int rank);

// A rule that names the placements of the parameters it matches. A pattern is a dotted path whose
// components are literal, "*" (any one component) or "**" (any number of them, also none). It
// matches a name in which it fits a run of whole components: "head" matches "head.weight" and
// "model.head.weight", not "hc_head.weight".
struct PlacementRule {
  std::string pattern;
  std::vector<Placement> placements;
};
// The most specific matching rule's index; -1 when none matches. More specific is the pattern with
// more literal components ("hc_head.*" and "head" have one each); of those with as many, the one
// with more "*", which is the longer ("hc_head.*"); of those, the one with fewer "**". The order of
// the rules means nothing: throws Error(kInvalidArgument) with the name and both patterns where two
// are left.
int find_rule(std::span<const PlacementRule> rules, std::string_view name);

}  // namespace tilestone
