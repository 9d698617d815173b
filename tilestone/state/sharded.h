// The wrapped entities of a state dict: sharded tensors and objects, factories, and values that
// are not saved. Semantics follow Megatron-Core's dist_checkpointing entities of the same names.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/geometry/flat_range.h"
#include "tilestone/geometry/placement.h"
#include "tilestone/state/tensor_view.h"
#include "tilestone/state/value.h"

namespace tilestone {

class StateNode;

// Which copy of the same data this is; all zeros (or none): the main replica.
using ReplicaId = Dims;
bool is_main_replica(const ReplicaId& id);

// One axis of a regular grid: this rank's data is cell `rank` of `fragments` along `axis`.
struct RankOffset {
  int64_t axis = 0;  // counts prepended axes
  int64_t rank = 0;
  int64_t fragments = 1;
};

// Elements of the global tensor, and where they are in memory.
struct Piece {
  Box box;          // in the global tensor
  TensorView data;  // of box's shape (leading dims of size 1 of prepended axes dropped or not:
                    // the elements in C order are the same); may be without data on load
};

struct ShardedTensor {
  std::string key;
  TensorView data;  // the local tensor as the caller gave it
  Dims global_shape;
  Box box;  // of the local tensor (before flattening) in the global tensor
  ReplicaId replica_id;
  int64_t prepend_axis_num = 0;
  bool allow_shape_mismatch = false;
  std::optional<FlatRange> flat_range;  // data is this slice of the flattened local tensor
  // Global ranks that hold the same pieces, ascending, this one included, where that is known by
  // rule (placements, a parameter, or declare_replicas); empty: not known.
  std::vector<int> holders;
  // What is stored and loaded: the one box, or those of the flat range or strided placement. Empty
  // boxes are left out, but a tensor that has no elements anywhere has one piece, the whole of it.
  std::vector<Piece> pieces;

  // A cell of a regular grid. global_shape = local shape (1 on prepended axes) × fragments.
  // Throws Error(kInvalidArgument) naming key, argument and value: a negative axis or rank,
  // fragments < 1, rank >= fragments, an axis named twice or out of range.
  static ShardedTensor from_rank_offsets(std::string key, TensorView data,
                                         std::span<const RankOffset> offsets,
                                         ReplicaId replica_id = {}, int64_t prepend_axis_num = 0);
  static ShardedTensor from_rank_offsets(std::string key, TensorView data,
                                         std::initializer_list<RankOffset> offsets,
                                         ReplicaId replica_id = {}, int64_t prepend_axis_num = 0);
  // 1-D `data`: the elements [flat_range) of the flattened local tensor of `local_shape`, itself
  // a cell of a regular grid.
  static ShardedTensor from_rank_offsets_flat(std::string key, TensorView data,
                                              const Dims& local_shape, FlatRange flat_range,
                                              std::span<const RankOffset> offsets,
                                              ReplicaId replica_id = {},
                                              int64_t prepend_axis_num = 0);
  // The local tensor of `rank` under a mesh and placements; box, replica id and holders follow.
  // A rank outside the mesh holds nothing: no pieces. Partial is refused.
  static ShardedTensor from_placements(std::string key, TensorView local, const Dims& global_shape,
                                       const Mesh& mesh, std::span<const Placement> placements,
                                       int rank);
  // The local tensor of `rank` of a parameter of `param_shape` (of the whole, as the parameter
  // knows it) that the checkpoint lays out in its own way; see merge_shardings, which throws.
  // `rank` is in both meshes.
  static ShardedTensor from_param(std::string key, TensorView local, const Dims& param_shape,
                                  const Sharding& param, const Sharding& checkpoint, int rank);
  // Any box of any global tensor (an irregular grid). box.shape equals data.shape, after
  // prepend_axis_num leading dims of size 1.
  static ShardedTensor from_box(std::string key, TensorView data, const Dims& global_shape,
                                const Box& box, ReplicaId replica_id = {},
                                int64_t prepend_axis_num = 0);
  // 1-D `data`: the elements [flat_range) of the flattened local tensor, which is any box of any
  // global tensor; its first prepend_axis_num dims have size 1. An empty range holds nothing.
  static ShardedTensor from_box_flat(std::string key, TensorView data, const Dims& global_shape,
                                     const Box& box, FlatRange flat_range,
                                     ReplicaId replica_id = {}, int64_t prepend_axis_num = 0);

  ShardedTensor& declare_replicas(std::vector<int> ranks) &;  // sets holders; sorted, unique
  bool is_regular_grid() const;  // each offset a multiple of the local size (size 0 exempt)
};

// Opaque data at a place in a grid of objects; not reshardable.
struct ShardedObject {
  std::string key;
  Value data;
  Dims global_shape;   // of the grid, in objects
  Dims global_offset;  // this object's place
  ReplicaId replica_id;

  static ShardedObject make(std::string key, Value data, Dims global_shape, Dims global_offset,
                            ReplicaId replica_id = {});
  // "key/shard_0.1_2.2": offset, then shape, joined by dots.
  std::string unique_key() const;
};

// The key of the grid: "key" of the unique key "key/shard_0.1_2.2", any other text as it is. A view
// of the text.
std::string_view grid_key(std::string_view unique_key);

// Stands for a subtree that is built before a save and merged after a load (SwiGLU's two halves).
// Both functions are pure, so that optimizer state can reuse a parameter's factory.
struct ShardedTensorFactory {
  using Build = std::function<StateNode(const std::string& key, const TensorView& data,
                                        const ReplicaId& replica_id,
                                        const std::optional<FlatRange>& flat_range)>;
  using Merge = std::function<StateNode(StateNode loaded)>;
  std::string key;
  TensorView data;
  Build build;
  Merge merge;
  ReplicaId replica_id;
  std::optional<FlatRange> flat_range;
};

// Not saved; a load gives back the template's own value.
struct LocalNonpersistent {
  std::shared_ptr<const StateNode> value;
};

}  // namespace tilestone
