// A borrowed view of a tensor's memory: what save reads from and load writes to.
#pragma once

#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone {

// Memory that the CPU can't address (a GPU's). Bytes are those of the C-contiguous copy of the
// tensor; calls come from any thread, one at a time for one object.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::string device() const = 0;  // "cuda:0"
  virtual void to_host(uint64_t begin, MutableByteView out) = 0;
  virtual void from_host(uint64_t begin, ByteView in) = 0;
  // The part of the tensor that `box` (in the tensor's own coordinates) names.
  virtual std::shared_ptr<DeviceMemory> narrow(const Box& box) = 0;
};

struct TensorView {
  // Address of element [0, ..., 0]; null for a tensor without data (its dtype and shape are known,
  // a load allocates it) and for device memory.
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;                          // elements; one per dim
  std::shared_ptr<DeviceMemory> device;  // null: host memory
  std::shared_ptr<const void> owner;     // keeps the memory alive; may be null

  // A C-contiguous view. Throws Error(kInvalidArgument) on a negative dim, an overflowing size,
  // or data == nullptr for a tensor with elements.
  static TensorView contiguous(void* data, DType dtype, Dims shape,
                               std::shared_ptr<const void> owner = nullptr);
  // A C-contiguous view of the elements of a vector, array or span, which must outlive it; the
  // dtype follows from their type. Error(kInvalidArgument) unless there are as many as the shape
  // says.
  template <std::ranges::contiguous_range Elements>
    requires std::ranges::borrowed_range<Elements> && std::ranges::sized_range<Elements> &&
             TensorElement<std::remove_reference_t<std::ranges::range_reference_t<Elements>>>
  static TensorView of(Elements&& elements, Dims shape) {
    return of_elements(std::ranges::data(elements), std::ranges::size(elements),
                       *dtype_of<std::ranges::range_value_t<Elements>>(), std::move(shape));
  }
  // A strided view of an allocation [begin, begin + bytes): shape and strides that reach outside
  // it are refused.
  static TensorView strided(void* data, DType dtype, Dims shape, Dims strides, const void* begin,
                            uint64_t bytes, std::shared_ptr<const void> owner = nullptr);
  static TensorView without_data(DType dtype, Dims shape);
  // Fresh zeroed, contiguous memory that the view owns, aligned to 64 bytes: payloads in files are
  // too, so that a large tensor need not be copied on its way to or from one.
  static TensorView allocate(DType dtype, Dims shape);

  bool has_data() const { return data != nullptr || device != nullptr || numel(shape) == 0; }
  uint64_t bytes() const;  // numel * itemsize, without gaps
  TensorView narrow(const Box& box) const;
  StridedView strided_view() const;  // host memory only
  // The elements in C order. Error(kInvalidArgument) unless they are of type T, in host memory and
  // contiguous.
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
