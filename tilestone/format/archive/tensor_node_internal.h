// A pickled tensor as torch.save describes it: a storage and a view of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tilestone/base/dtype.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

struct TensorNode {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;             // elements, >= 0
  uint64_t offset = 0;      // of element [0, ..., 0] in the storage, bytes
  std::string_view record;  // the storage's record is "TOP/data/" + record; borrowed
  uint64_t storage = 0;     // bytes of the whole storage
  bool conjugated = false;  // lazily: the stored elements must be conjugated
  bool negated = false;     // lazily: the stored elements must be negated
  Autograd autograd;
  bool has_attributes = false;  // a parameter with attributes, which are not in TensorNode
};

// torch's storage class of a dtype ("FloatStorage"); "" for dtypes that torch stores in untyped
// storages.
std::string_view storage_class(DType dtype);

// nullopt if the node is not a call of one of torch's functions that rebuild tensors.
// Error(kCorrupt) if its arguments contradict each other (shape and strides that reach outside the
// storage); Error(kUnsupported) for dtypes that Tilestone does not have, and for lazily negated
// ints.
std::optional<TensorNode> read_tensor_node(const Pickle& pickle, NodeId id);

}  // namespace tilestone::archive
