// A state dict split into items: what a checkpoint holds by key. A dialect makes items from a tree
// and puts the loaded ones back into it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

struct TensorItem {
  std::string key;
  Path path;  // path in the tree; empty if the key does not follow from a path
  DType dtype = DType::kFloat32;
  Dims global_shape;
  std::vector<Piece> pieces;  // this rank's; empty if it holds nothing of the tensor
  ReplicaId replica_id;
  std::vector<int> holders;  // ascending; empty if not known without communication
  bool allow_shape_mismatch = false;
  // The cell shape of the grid whose cells the tensor's chunks are. Set if the format needs a grid
  // and the ranks have agreed on it. Cells at the upper edges may extend beyond the tensor.
  std::optional<Dims> chunk_shape = std::nullopt;
  bool common = false;            // a plain tensor: the same on every rank that has it
  uint32_t order = 0;             // its position among the leaves of the tree
  bool unknown_replicas = false;  // see ShardedTensor
};

struct ObjectItem {
  std::string key;
  Path path;
  Value value;
  ReplicaId replica_id;
  bool common = false;  // the same on every rank that has it; the lowest of them writes it
  uint32_t order = 0;   // its position among the leaves of the tree
};

struct Items {
  std::vector<TensorItem> tensors;
  std::vector<ObjectItem> objects;
  // The part of the state that is not sharded, as one value (a dict). Set by dialects that store it
  // so. It is the same on every rank.
  std::optional<Value> common = std::nullopt;
  TreeKeys dict_keys = {};  // of the dicts in the items' paths
};

}  // namespace tilestone
