// DLPack (github.com/dmlc/dlpack): its element types, and torch's tensors through its C exchange
// interface.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "tilestone/tilestone.h"

namespace tilestone::python {

namespace nb = nanobind;

// nullopt if a checkpoint has no such element type.
std::optional<DType> to_dtype(const nb::dlpack::dtype& dtype);

// Whether several elements may share memory, as those of an expanded tensor do. Strides may be in
// elements or in bytes. False only if all elements certainly have different addresses.
bool shares_elements(const Dims& shape, const Dims& strides);

struct DlpackExchange;

// Makes views of torch's plain tensors through C calls only. Borrows torch's types, which exist as
// long as the process. Needs the GIL.
class TorchTensors {
 public:
  // Finds no tensors if torch is not loaded or has no exchange interface (before torch 2.10).
  TorchTensors();

  // A view of a torch.Tensor or Parameter (not of a subclass) that is dense, on the CPU, of a real
  // dtype, not lazily negated and, for a load, not expanded. nullopt for anything else, which
  // tilestone._torch.tensors handles or refuses. Error(kInvalidArgument) if the tensor reaches
  // outside its storage.
  std::optional<TensorView> find_view(nb::handle object, bool for_load) const;

 private:
  PyTypeObject* tensor_ = nullptr;
  PyTypeObject* parameter_ = nullptr;
  PyObject* uint8_ = nullptr;
  PyObject* int8_ = nullptr;
  const DlpackExchange* exchange_ = nullptr;
};

}  // namespace tilestone::python
