// A view of a tensor's memory, which the view need not own. A save reads from it, a load writes to
// it.
#pragma once

#include <memory>
#include <ranges>
#include <span>
#include <type_traits>
#include <utility>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/state/device_memory.h"

namespace tilestone {

struct TensorView {
  // The address of element [0, ..., 0]. Null for device memory, and for a tensor without data, of
  // which only dtype and shape are known (a load allocates its memory).
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;                          // in elements, one per dim
  std::shared_ptr<DeviceMemory> device;  // null for host memory
  std::shared_ptr<const void> owner;     // keeps the memory alive; may be null

  // A C-contiguous view. Throws Error(kInvalidArgument) on a negative dim, on size overflow, and if
  // data is null for a tensor with elements.
  static TensorView contiguous(void* data, DType dtype, Dims shape,
                               std::shared_ptr<const void> owner = nullptr);
  // A C-contiguous view of the elements of a vector, array or span, which must outlive it. The
  // dtype follows from the element type. Throws Error(kInvalidArgument) if the number of elements
  // does not match the shape.
  template <std::ranges::contiguous_range Elements>
    requires std::ranges::borrowed_range<Elements> && std::ranges::sized_range<Elements> &&
             TensorElement<std::remove_reference_t<std::ranges::range_reference_t<Elements>>>
  static TensorView of(Elements&& elements, Dims shape) {
    return of_elements(std::ranges::data(elements), std::ranges::size(elements),
                       *dtype_of<std::ranges::range_value_t<Elements>>(), std::move(shape));
  }
  // A strided view into the allocation [begin, begin + bytes). Throws Error(kInvalidArgument) if
  // shape and strides reach outside it.
  static TensorView strided(void* data, DType dtype, Dims shape, Dims strides, const void* begin,
                            uint64_t bytes, std::shared_ptr<const void> owner = nullptr);
  static TensorView without_data(DType dtype, Dims shape);
  // New contiguous memory, filled with zeros, that the view owns. It is aligned to 64 bytes, as
  // payloads in files are, so that large tensors need not be copied on the way to or from a file.
  // Large memory is in huge pages where the system has them.
  static TensorView allocate(DType dtype, Dims shape);

  bool has_data() const { return data != nullptr || device != nullptr || numel(shape) == 0; }
  uint64_t bytes() const;  // numel * itemsize
  TensorView narrow(const Box& box) const;
  // A copy from or to the whole tensor, which is in device memory. `host` has its size.
  DeviceCopy device_copy(MutableByteView host) const { return {device, 0, host}; }
  StridedView strided_view() const;  // throws if there is no data in host memory
  // The elements in C order. Throws Error(kInvalidArgument) unless they are of type T, in host
  // memory and contiguous.
  template <TensorElement T>
  std::span<T> elements() const {
    check_elements(*dtype_of<T>());
    return {reinterpret_cast<T*>(data), static_cast<size_t>(numel(shape))};
  }

 private:
  static TensorView of_elements(void* data, uint64_t count, DType dtype, Dims shape);
  void check_elements(DType wanted) const;
};

}  // namespace tilestone
