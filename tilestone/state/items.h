// A state dict taken apart: the items that a checkpoint holds by key. A dialect makes them from a
// tree and puts the loaded ones back.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tilestone/state/state_dict.h"

namespace tilestone {

struct TensorItem {
  std::string key;
  Path path;  // where the tree has it; empty for a key that is not its path
  DType dtype = DType::kFloat32;
  Dims global_shape;
  std::vector<Piece> pieces;  // this rank's; none: it holds nothing of the tensor
  ReplicaId replica_id;
  std::vector<int> holders;  // ascending; empty: not known by rule
  bool allow_shape_mismatch = false;
  // Of the grid that the tensor's chunks are cells of, where the format needs one and the ranks
  // have agreed on it; the cells at the upper edges may reach beyond the tensor.
  std::optional<Dims> chunk_shape = std::nullopt;
  bool common = false;  // not wrapped: the same on every rank that has it
};

struct ObjectItem {
  std::string key;
  Path path;
  Value value;
  ReplicaId replica_id;
  bool common = false;  // every rank has it, the lowest rank that does writes it
};

struct Items {
  std::vector<TensorItem> tensors;
  std::vector<ObjectItem> objects;
  // What is not sharded, as one value (a dict), in dialects that keep it so: the same on every
  // rank.
  std::optional<Value> common = std::nullopt;
};

}  // namespace tilestone
