// Arrays through DLPack (github.com/dmlc/dlpack): its element types, and torch's tensors by its C
// exchange interface.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "tilestone/tilestone.h"

namespace tilestone::python {

namespace nb = nanobind;

// nullopt: no element type of a checkpoint.
std::optional<DType> to_dtype(const nb::dlpack::dtype& dtype);

// Whether several elements may lie in one place, as those of an expanded tensor do; strides in
// elements or in bytes. False only for what surely has a place for each.
bool shares_elements(const Dims& shape, const Dims& strides);

struct DlpackExchange;

// torch's plain tensors as views, by C calls alone. Borrows torch's types, which live as long as
// the process; needs the GIL.
class TorchTensors {
 public:
  TorchTensors();  // finds nothing where torch is not loaded, or has no exchange interface (< 2.10)

  // A view of a torch.Tensor or Parameter (of no subclass) that is dense, on the CPU, of a real
  // dtype, not lazily negated and, for a load, not expanded. nullopt: anything else, for which
  // tilestone._torch_bridge knows what to do or to say. Error(kInvalidArgument) where the tensor
  // reaches outside its storage.
  std::optional<TensorView> find_view(nb::handle object, bool for_load) const;

 private:
  PyTypeObject* tensor_ = nullptr;
  PyTypeObject* parameter_ = nullptr;
  PyObject* uint8_ = nullptr;
  PyObject* int8_ = nullptr;
  const DlpackExchange* exchange_ = nullptr;
};

}  // namespace tilestone::python
