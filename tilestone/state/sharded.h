// The wrapped entities of a state dict: sharded tensors and objects, factories, and values that are
// not saved. They behave like the Megatron-Core dist_checkpointing entities of the same names.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/geometry/box.h"
#include "tilestone/geometry/placement.h"
#include "tilestone/state/tensor_view.h"
#include "tilestone/state/value.h"

namespace tilestone {

class StateNode;

// Identifies one replica of the same data. The main replica has all zeros, or no numbers at all.
using ReplicaId = Dims;
bool is_main_replica(const ReplicaId& id);

// One axis of a regular grid: this rank's data is cell `rank` of `fragments` along `axis`.
struct RankOffset {
  int64_t axis = 0;  // prepended axes count too
  int64_t rank = 0;
  int64_t fragments = 1;
};

// A box of the global tensor and its elements in memory.
struct Piece {
  Box box;          // in the global tensor
  TensorView data;  // has box's shape, with or without the leading dims of size 1 of prepended axes
                    // (the C order is the same); may have no data on load
};

struct ShardedTensor {
  std::string key;
  TensorView data;  // the local tensor as the caller gave it
  Dims global_shape;
  Box box;  // the local tensor (before flattening) in the global tensor
  ReplicaId replica_id;
  int64_t prepend_axis_num = 0;
  bool allow_shape_mismatch = false;
  std::optional<FlatRange> flat_range;  // data is this slice of the flattened local tensor
  // The global ranks that hold the same pieces, ascending, including this one. Only set if they are
  // known without communication: from placements, a parameter or declare_replicas(). Otherwise
  // empty.
  std::vector<int> holders;
  // The replica id says nothing: a rank that holds a box doesn't know whether others hold it too.
  bool unknown_replicas = false;
  bool common = false;  // a plain tensor that its holders have too: see TensorItem::common
  // What is stored and loaded: one box, or the boxes of a flat range or a strided placement. Empty
  // boxes are left out, but a tensor without any elements has one piece, which is the whole tensor.
  std::vector<Piece> pieces;

  // A cell of a regular grid. global_shape = local shape (1 on prepended axes) × fragments. Throws
  // Error(kInvalidArgument), naming key, argument and value, on a negative axis or rank, fragments
  // < 1, rank >= fragments, and an axis that is out of range or named twice.
  static ShardedTensor from_rank_offsets(std::string key, TensorView data,
                                         std::span<const RankOffset> offsets,
                                         ReplicaId replica_id = {}, int64_t prepend_axis_num = 0);
  static ShardedTensor from_rank_offsets(std::string key, TensorView data,
                                         std::initializer_list<RankOffset> offsets,
                                         ReplicaId replica_id = {}, int64_t prepend_axis_num = 0);
  // `data` is 1-D: the elements [flat_range) of the flattened local tensor of `local_shape`, which
  // is a cell of a regular grid.
  static ShardedTensor from_rank_offsets_flat(std::string key, TensorView data,
                                              const Dims& local_shape, FlatRange flat_range,
                                              std::span<const RankOffset> offsets,
                                              ReplicaId replica_id = {},
                                              int64_t prepend_axis_num = 0);
  // The local tensor of `rank`, described by a mesh and placements, which determine box, replica id
  // and holders. A rank outside the mesh holds nothing and has no pieces. Throws on Partial.
  static ShardedTensor from_placements(std::string key, TensorView local, const Dims& global_shape,
                                       const Mesh& mesh, std::span<const Placement> placements,
                                       int rank);
  // The local tensor of `rank` of a parameter that the checkpoint shards in its own way.
  // param_shape is the global shape as the parameter knows it. `rank` must be in both meshes. See
  // merge_shardings() for details and errors.
  static ShardedTensor from_param(std::string key, TensorView local, const Dims& param_shape,
                                  const Sharding& param, const Sharding& checkpoint, int rank);
  // Any box of any global tensor (an irregular grid). box.shape is data.shape with prepend_axis_num
  // leading dims of size 1.
  static ShardedTensor from_box(std::string key, TensorView data, const Dims& global_shape,
                                const Box& box, ReplicaId replica_id = {},
                                int64_t prepend_axis_num = 0);
  // `data` is 1-D: the elements [flat_range) of the flattened local tensor, which is any box of any
  // global tensor. The box's first prepend_axis_num dims have size 1. An empty range holds nothing.
  static ShardedTensor from_box_flat(std::string key, TensorView data, const Dims& global_shape,
                                     const Box& box, FlatRange flat_range,
                                     ReplicaId replica_id = {}, int64_t prepend_axis_num = 0);

  // Any boxes of a global tensor, each with its own memory (torch's _Checkpointable protocol).
  // piece.data has the shape of its box and data's dtype; empty pieces are left out. `data` is only
  // what a load returns; it must have data, or no elements.
  static ShardedTensor from_pieces(std::string key, TensorView data, const Dims& global_shape,
                                   std::vector<Piece> pieces);

  // Sets holders to these ranks, sorted and without duplicates.
  ShardedTensor& declare_replicas(std::vector<int> ranks) &;
  bool is_regular_grid() const;  // each offset is a multiple of the local size, if that is not 0
};

// Opaque data of a cell in a grid of objects. Can't be resharded.
struct ShardedObject {
  std::string key;
  Value data;
  Dims global_shape;   // shape of the grid, in objects
  Dims global_offset;  // this object's cell in the grid
  ReplicaId replica_id;

  static ShardedObject make(std::string key, Value data, Dims global_shape, Dims global_offset,
                            ReplicaId replica_id = {});
  // "key/shard_0.1_2.2": the offset, then the shape, each joined by dots.
  std::string unique_key() const;
};

// The key of the grid: "key" for the unique key "key/shard_0.1_2.2". Any other text is returned
// unchanged. The result is a view of the argument.
std::string_view grid_key(std::string_view unique_key);

// Represents a subtree that is built before a save and merged after a load (such as the two halves
// of SwiGLU). Both functions are pure, so that optimizer state can reuse a parameter's factory.
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

// A value that is not saved. A load returns the template's own value.
struct LocalNonpersistent {
  std::shared_ptr<const StateNode> value;
};

}  // namespace tilestone
