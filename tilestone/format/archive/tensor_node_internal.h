// A pickled tensor, as torch.save describes one: a storage and how to look at it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tilestone/base/dtype.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/geometry/dims.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

struct TensorNode {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;             // elements, >= 0
  uint64_t offset = 0;      // of element [0, ..., 0] in the storage, bytes
  std::string_view record;  // the storage's record: "TOP/data/" and this
  uint64_t storage = 0;     // bytes of the whole storage
  bool conjugated = false;  // the elements are the conjugates of the stored ones
  bool negated = false;     // the stored ones with the other sign
  Autograd autograd;
  bool has_attributes = false;  // a parameter with attributes of its own, which stand elsewhere
};

bool is_complex(DType dtype);

// nullopt when the node is no call of torch's tensor-rebuilding functions. Error(kCorrupt) when
// its arguments contradict one another (shape and strides that reach outside the storage),
// kUnsupported for what Tilestone has no dtype for, and for lazily negated ints.
std::optional<TensorNode> read_tensor_node(const Pickle& pickle, NodeId id);

}  // namespace tilestone::archive
