#include "python/src/dlpack.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "python/src/bindings.h"

namespace tilestone::python {

// The C structures of dlpack.h, version 1.

struct DlpackTensor {
  void* data;
  nb::dlpack::device device;
  int32_t ndim;
  nb::dlpack::dtype dtype;
  int64_t* shape;
  int64_t* strides;  // elements
  uint64_t byte_offset;
};

// The structure in the capsule __dlpack_c_exchange_api__ of a type.
struct DlpackExchange {
  uint32_t major;
  uint32_t minor;
  const DlpackExchange* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  // Fills `out` with pointers into the object. Returns 0, or -1 with a Python exception. May be
  // null.
  int (*tensor_from_object)(void* object, DlpackTensor* out);
  void* current_work_stream;
};

namespace {

using Code = nb::dlpack::dtype_code;

constexpr uint32_t kMajor = 1;  // the major version of the structures above

const DlpackExchange* exchange_of(PyTypeObject* type) {
  const nb::handle object(reinterpret_cast<PyObject*>(type));
  const nb::object capsule = nb::getattr(object, "__dlpack_c_exchange_api__", nb::none());
  constexpr const char* kName = "dlpack_exchange_api";
  if (PyCapsule_IsValid(capsule.ptr(), kName) == 0) return nullptr;
  const auto* exchange =
      static_cast<const DlpackExchange*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  while (exchange != nullptr && exchange->major > kMajor) exchange = exchange->older;
  if (exchange == nullptr || exchange->major != kMajor) return nullptr;
  return exchange->tensor_from_object != nullptr ? exchange : nullptr;
}

PyTypeObject* type_named(nb::handle module, const char* name) {
  return reinterpret_cast<PyTypeObject*>(nb::object(module.attr(name)).ptr());
}

nb::object checked(PyObject* result) {
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

template <const char* kName>
PyObject* name() {
  static PyObject* const interned = PyUnicode_InternFromString(kName);
  return interned;
}

template <const char* kName>
nb::object get(nb::handle object) {
  return checked(PyObject_GetAttr(object.ptr(), name<kName>()));
}

template <const char* kName>
nb::object call(nb::handle object) {
  PyObject* self = object.ptr();
  return checked(PyObject_VectorcallMethod(name<kName>(), &self, 1, nullptr));
}

// Attributes with which a tensor says that it is a part of a whole: see tilestone._torch.parts.
constexpr char kWriteItems[] = "__create_write_items__";
constexpr char kChunkList[] = "__create_chunk_list__";
constexpr char kGlobalShape[] = "global_shape";

// Whether a tensor itself, not its class, may say that it is a part of a whole.
bool may_be_part(nb::handle object) {
  const nb::object attributes = checked(PyObject_GenericGetDict(object.ptr(), nullptr));
  if (PyDict_Size(attributes.ptr()) == 0) return false;
  const auto has = [&](PyObject* key) { return PyDict_Contains(attributes.ptr(), key) == 1; };
  return has(name<kWriteItems>()) || has(name<kChunkList>()) || has(name<kGlobalShape>());
}

constexpr char kIsCpu[] = "is_cpu";
constexpr char kDtype[] = "dtype";
constexpr char kIsNeg[] = "is_neg";
constexpr char kUntypedStorage[] = "untyped_storage";
constexpr char kDataPtr[] = "data_ptr";
constexpr char kNbytes[] = "nbytes";

Dims dims(const int64_t* values, int32_t count) {
  return Dims(std::span(values, static_cast<size_t>(count)));
}

}  // namespace

bool shares_elements(const Dims& shape, const Dims& strides) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // (distance, number) of elements
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) return false;
    if (shape[d] > 1) dims.emplace_back(std::abs(strides[d]), shape[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [distance, count] : dims) {
    if (distance <= reach) return true;
    reach += distance * (count - 1);
  }
  return false;
}

std::optional<DType> to_dtype(const nb::dlpack::dtype& dtype) {
  struct Known {
    Code code;
    uint8_t bits;
    DType dtype;
  };
  static constexpr Known kKnown[] = {
      {Code::Float, 32, DType::kFloat32},
      {Code::Bfloat, 16, DType::kBFloat16},
      {Code::Float, 16, DType::kFloat16},
      {Code::Float, 64, DType::kFloat64},
      {Code::Int, 64, DType::kInt64},
      {Code::Int, 32, DType::kInt32},
      {Code::Int, 16, DType::kInt16},
      {Code::Int, 8, DType::kInt8},
      {Code::UInt, 64, DType::kUInt64},
      {Code::UInt, 32, DType::kUInt32},
      {Code::UInt, 16, DType::kUInt16},
      {Code::UInt, 8, DType::kUInt8},
      {Code::Bool, 8, DType::kBool},
      {Code::Complex, 32, DType::kComplex32},
      {Code::Complex, 64, DType::kComplex64},
      {Code::Complex, 128, DType::kComplex128},
      {Code::Float8_E4M3FN, 8, DType::kFloat8E4M3FN},
      {Code::Float8_E4M3FNUZ, 8, DType::kFloat8E4M3FNUZ},
      {Code::Float8_E5M2, 8, DType::kFloat8E5M2},
      {Code::Float8_E5M2FNUZ, 8, DType::kFloat8E5M2FNUZ},
      {Code::Float8_E8M0FNU, 8, DType::kFloat8E8M0FNU},
  };
  if (dtype.lanes != 1) return std::nullopt;
  for (const Known& known : kKnown) {
    if (static_cast<uint8_t>(known.code) == dtype.code && known.bits == dtype.bits) {
      return known.dtype;
    }
  }
  return std::nullopt;
}

TorchTensors::TorchTensors() {
  const nb::handle torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
  // While torch is being imported, the unfinished module is already there.
  if (!torch.is_valid() || !nb::hasattr(torch, "Tensor") || !nb::hasattr(torch, "nn")) return;
  tensor_ = type_named(torch, "Tensor");
  parameter_ = type_named(torch.attr("nn"), "Parameter");
  uint8_ = nb::object(torch.attr("uint8")).ptr();
  int8_ = nb::object(torch.attr("int8")).ptr();
  exchange_ = exchange_of(tensor_);
}

std::optional<TensorView> TorchTensors::find_view(nb::handle object, bool for_load) const {
  const PyTypeObject* type = Py_TYPE(object.ptr());
  if (exchange_ == nullptr || (type != tensor_ && type != parameter_)) return std::nullopt;
  if (get<kIsCpu>(object).ptr() != Py_True) return std::nullopt;
  if (may_be_part(object)) return std::nullopt;
  DlpackTensor tensor{};
  if (exchange_->tensor_from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();  // sparse, nested or quantised
    return std::nullopt;
  }
  const std::optional<DType> dtype = to_dtype(tensor.dtype);
  if (tensor.device.device_type != nb::device::cpu::value || !dtype) return std::nullopt;
  // Integers of fewer than 8 bits look like 8-bit integers.
  if (*dtype == DType::kUInt8 && get<kDtype>(object).ptr() != uint8_) return std::nullopt;
  if (*dtype == DType::kInt8 && get<kDtype>(object).ptr() != int8_) return std::nullopt;
  // Complex tensors may be lazily conjugated; real tensors that are parts of complex ones may be
  // lazily negated.
  if (tensor.dtype.code == static_cast<uint8_t>(Code::Complex)) return std::nullopt;
  if (call<kIsNeg>(object).ptr() != Py_False) return std::nullopt;
  const Dims shape = dims(tensor.shape, tensor.ndim);
  const Dims strides = dims(tensor.strides, tensor.ndim);
  if (for_load && shares_elements(shape, strides)) return std::nullopt;
  const nb::object storage = call<kUntypedStorage>(object);
  const auto begin = nb::cast<uintptr_t>(call<kDataPtr>(storage));
  const auto bytes = nb::cast<uint64_t>(call<kNbytes>(storage));
  return TensorView::strided(static_cast<std::byte*>(tensor.data) + tensor.byte_offset, *dtype,
                             shape, strides, reinterpret_cast<const void*>(begin), bytes,
                             keep_alive(object));
}

}  // namespace tilestone::python
