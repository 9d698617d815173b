#include "tilestone/format/archive/tensor_node_internal.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/format/archive/pickle_schema_internal.h"

namespace tilestone::archive {
namespace {

using Nodes = std::span<const NodeId>;

[[noreturn]] void corrupt_tensor(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "pickled tensor: " + problem);
}

struct StorageClass {
  std::string_view name;
  DType dtype;
};
constexpr StorageClass kStorageClasses[] = {
    {"FloatStorage", DType::kFloat32},
    {"BFloat16Storage", DType::kBFloat16},
    {"HalfStorage", DType::kFloat16},
    {"DoubleStorage", DType::kFloat64},
    {"LongStorage", DType::kInt64},
    {"IntStorage", DType::kInt32},
    {"ShortStorage", DType::kInt16},
    {"CharStorage", DType::kInt8},
    {"ByteStorage", DType::kUInt8},
    {"BoolStorage", DType::kBool},
    {"ComplexFloatStorage", DType::kComplex64},
    {"ComplexDoubleStorage", DType::kComplex128},
};

bool is_integer(DType dtype) { return dtype <= DType::kInt64; }

bool is_storage_module(std::string_view module) {
  return module == "torch" || module == "torch.storage" || module == "torch.cuda";
}

// ('storage', class, record, device, elements)
struct StorageNode {
  std::optional<DType> dtype;  // nullopt: an untyped storage; its elements are bytes
  std::string_view record;
  uint64_t elements = 0;
};

StorageNode read_storage(const Pickle& pickle, NodeId id) {
  if (!pickle.is(id, NodeKind::kPersistent) || !pickle.is(pickle.args(id), NodeKind::kTuple)) {
    corrupt_tensor("expected a persistent id of a storage, found " + describe(pickle, id));
  }
  const Nodes parts = pickle.items(pickle.args(id));
  if (parts.size() < 5 || read_string(pickle, parts[0], "a persistent id") != "storage") {
    corrupt_tensor("the persistent id does not name a storage");
  }
  StorageNode storage;
  storage.record = read_string(pickle, parts[2], "a storage's record");
  storage.elements = static_cast<uint64_t>(read_count(pickle, parts[4], "a storage's size"));
  if (!pickle.is(parts[1], NodeKind::kGlobal) || !is_storage_module(pickle.module(parts[1]))) {
    corrupt_tensor("expected a storage class of torch, found " + describe(pickle, parts[1]));
  }
  const std::string_view name = pickle.name(parts[1]);
  if (name == "UntypedStorage") return storage;
  for (const StorageClass& known : kStorageClasses) {
    if (known.name == name) storage.dtype = known.dtype;
  }
  if (!storage.dtype) {
    throw Error(ErrorCode::kUnsupported, "pickled tensor: the storage class " +
                                             describe(pickle, parts[1]) + " is not supported");
  }
  return storage;
}

// Reads {"conj": True, "neg": True}, which mark a lazily conjugated or negated tensor.
void read_lazy(const Pickle& pickle, NodeId metadata, TensorNode& tensor) {
  if (!pickle.is(metadata, NodeKind::kDict)) return;
  const Nodes items = pickle.items(metadata);
  for (size_t i = 0; i < items.size(); i += 2) {
    const bool set = pickle.is(items[i + 1], NodeKind::kBool) && pickle.boolean(items[i + 1]);
    if (!set || !pickle.is(items[i], NodeKind::kString)) continue;
    const std::string_view name = pickle.text(items[i]);
    if (name == "conj") tensor.conjugated = is_complex(tensor.dtype);
    if (name == "neg") tensor.negated = true;
  }
  if (tensor.negated && is_integer(tensor.dtype)) {
    throw Error(ErrorCode::kUnsupported, "pickled tensor: lazily negated ints are not supported")
        .with_hint("save tensor.resolve_neg() instead");
  }
}

// In torch, only tensors of floating-point and complex numbers can require gradients.
bool read_requires_grad(const Pickle& pickle, NodeId id, DType dtype) {
  const bool requires_grad = pickle.is(id, NodeKind::kBool) && pickle.boolean(id);
  if (requires_grad && (is_integer(dtype) || dtype == DType::kBool)) {
    corrupt_tensor("a tensor of dtype " + std::string(to_string(dtype)) +
                   " can't have requires_grad set");
  }
  return requires_grad;
}

// Checks that every element of the view is in the storage.
void check_extent(const TensorNode& tensor, uint64_t first, uint64_t elements) {
  if (tensor.strides.size() != tensor.shape.size()) {
    corrupt_tensor("the shape and the strides differ in length");
  }
  if (first > elements) corrupt_tensor("its offset is outside its storage");
  checked_mul(static_cast<uint64_t>(numel(tensor.shape)), itemsize(tensor.dtype),
              "bytes of the tensor");
  if (numel(tensor.shape) == 0) return;
  uint64_t last = first;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    const auto steps = static_cast<uint64_t>(tensor.shape[d] - 1);
    last = checked_add(
        last, checked_mul(steps, static_cast<uint64_t>(tensor.strides[d]), "strides"), "strides");
  }
  if (last >= elements) {
    corrupt_tensor("the shape " + to_string(tensor.shape) + " with strides " +
                   to_string(tensor.strides) + " at offset " + std::to_string(first) +
                   " reaches outside the storage of " + std::to_string(elements) + " elements");
  }
}

// Reads (storage, offset, shape, strides, requires_grad, hooks[, dtype][, metadata]).
TensorNode read_rebuild(const Pickle& pickle, Nodes args, bool has_dtype) {
  const size_t required = has_dtype ? 7 : 6;
  if (args.size() < required) corrupt_tensor("there are too few arguments");
  const StorageNode storage = read_storage(pickle, args[0]);
  TensorNode tensor;
  std::optional<DType> dtype = storage.dtype;
  if (has_dtype) {
    dtype = read_dtype(pickle, args[6]);
    if (!dtype) {
      throw Error(ErrorCode::kUnsupported,
                  "pickled tensor: the dtype " + describe(pickle, args[6]) + " is not supported");
    }
  }
  if (!dtype) corrupt_tensor("the storage is untyped, and no dtype is given");
  tensor.dtype = *dtype;
  tensor.record = storage.record;
  const uint64_t element = storage.dtype ? itemsize(*storage.dtype) : 1;
  tensor.storage = checked_mul(storage.elements, element, "bytes of a storage");
  tensor.shape = read_dims(pickle, args[2], "a tensor's shape");
  tensor.strides = read_dims(pickle, args[3], "a tensor's strides");
  const auto first = static_cast<uint64_t>(read_count(pickle, args[1], "a tensor's offset"));
  check_extent(tensor, first, tensor.storage / itemsize(tensor.dtype));
  tensor.offset = first * itemsize(tensor.dtype);
  tensor.autograd.requires_grad = read_requires_grad(pickle, args[4], tensor.dtype);
  if (args.size() > required) read_lazy(pickle, args[required], tensor);
  return tensor;
}

constexpr std::string_view kModule = "torch._utils";

std::optional<TensorNode> read_call(const Pickle& pickle, NodeId function, Nodes args) {
  if (pickle.is_global(function, kModule, "_rebuild_tensor_v2")) {
    return read_rebuild(pickle, args, false);
  }
  if (pickle.is_global(function, kModule, "_rebuild_tensor_v3")) {
    return read_rebuild(pickle, args, true);
  }
  return std::nullopt;
}

// Reads a tensor, or a tensor with attributes: (function, class, arguments, attributes).
std::optional<TensorNode> read_unwrapped(const Pickle& pickle, NodeId id) {
  const NodeId function = pickle.callable(id);
  const Nodes args = pickle.items(pickle.args(id));
  if (!pickle.is_global(function, "torch._tensor", "_rebuild_from_type_v2")) {
    return read_call(pickle, function, args);
  }
  if (args.size() != 4 || !pickle.is(args[0], NodeKind::kGlobal) ||
      !pickle.is(args[2], NodeKind::kTuple)) {
    return std::nullopt;
  }
  const bool parameter = pickle.is_global(args[1], "torch.nn.parameter", "Parameter");
  if (!parameter && !pickle.is_global(args[1], "torch", "Tensor")) return std::nullopt;
  auto tensor = read_call(pickle, args[0], pickle.items(args[2]));
  if (tensor) tensor->autograd.parameter = parameter;
  return tensor;
}

// Reads a parameter: a call whose first argument is the call that rebuilds a tensor,
// (tensor, requires_grad, hooks[, attributes]).
std::optional<TensorNode> read_parameter(const Pickle& pickle, NodeId id) {
  const NodeId function = pickle.callable(id);
  const bool attributes = pickle.is_global(function, kModule, "_rebuild_parameter_with_state");
  if (!attributes && !pickle.is_global(function, kModule, "_rebuild_parameter")) {
    return std::nullopt;
  }
  const Nodes args = pickle.items(pickle.args(id));
  if (args.size() < 2 || !pickle.is(args[0], NodeKind::kCall)) return std::nullopt;
  auto tensor = read_unwrapped(pickle, args[0]);
  if (!tensor) return std::nullopt;
  tensor->autograd = {true, read_requires_grad(pickle, args[1], tensor->dtype)};
  tensor->has_attributes = attributes;
  return tensor;
}

}  // namespace

std::string_view storage_class(DType dtype) {
  const auto* const known = std::ranges::find(kStorageClasses, dtype, &StorageClass::dtype);
  return known == std::end(kStorageClasses) ? std::string_view() : known->name;
}

std::optional<TensorNode> read_tensor_node(const Pickle& pickle, NodeId id) {
  if (!pickle.is(id, NodeKind::kCall)) return std::nullopt;
  try {
    if (auto parameter = read_parameter(pickle, id)) return parameter;
    return read_unwrapped(pickle, id);
  } catch (Error& error) {
    // Checked arithmetic reports an overflow as an invalid argument. Here it comes from a file.
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    throw Error(ErrorCode::kCorrupt, "pickled tensor: " + error.message());
  }
}

}  // namespace tilestone::archive
