// A view of a tensor's memory, which the view need not own. A save reads from it, a load writes to
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"

namespace tilestone {

struct StridedView;

// Memory that the CPU can't address (such as a GPU's), and copies between it and host memory.
//
// Copies are submitted in batches, and each batch is waited for once. So a device can copy one
// batch while the host writes or reads another one.

class DeviceMemory;

// One copy of a batch. Byte ranges refer to the C-contiguous copy of the tensor.
struct DeviceCopy {
  std::shared_ptr<DeviceMemory> memory;  // the tensor
  uint64_t begin = 0;                    // its first byte that is copied
  MutableByteView host;                  // as many bytes; only read by a copy to the device
};

enum class CopyTo : uint8_t { kHost, kDevice };

// A batch of copies that was submitted. Used by one thread at a time.
class DeviceTransfer {
 public:
  // If wait() was not called, waits without reporting a failure.
  virtual ~DeviceTransfer() = default;
  // Returns when all copies have ended. Throws if one has failed. Called at most once.
  virtual void wait() = 0;
};

// Makes host memory of that many bytes fast for copies from and to a device (pinned memory).
// Returns an owner of the memory that undoes this before it releases the memory; or `memory`
// itself if it can't be pinned.
using PinHost =
    std::function<std::shared_ptr<std::byte>(std::shared_ptr<std::byte> memory, uint64_t bytes)>;

// A tensor in the memory of a device. All calls may come from several threads at once.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::string device() const = 0;  // "cuda:0"
  // Starts the copies and returns, in general before they are done. All are of this object's class
  // and device. They see what the program did to the memory before it passed the tensor to
  // Tilestone. The device does the batches in the order in which they are submitted. Until a
  // transfer has ended it keeps the tensors alive, and neither side's bytes may be changed, or read
  // where they are written.
  virtual std::unique_ptr<DeviceTransfer> submit(CopyTo to, std::span<const DeviceCopy> copies) = 0;
  // The part of the tensor inside `box`, which is in the tensor's own coordinates.
  virtual std::shared_ptr<DeviceMemory> narrow(const Box& box) = 0;
  // Where the elements are, by addresses of the device. They tell whether tensors of one device
  // share memory, and are good for nothing else. Without data: not known.
  virtual StridedView place() const;
  // Pins host memory for copies from and to this device. It may be kept for longer than this
  // tensor, and does not keep it alive. Empty if pinning has no use.
  virtual PinHost pin() const { return {}; }
};

// Copies of any classes and devices, which were submitted as one batch for each class and device.
// The destructor waits for those that wait() has not waited for.
class DeviceBatch {
 public:
  DeviceBatch() = default;
  DeviceBatch(CopyTo to, std::span<const DeviceCopy> copies);
  void wait();  // throws the first failure

 private:
  std::vector<std::unique_ptr<DeviceTransfer>> transfers_;
};

// Submits the copies and waits for them.
void copy_now(CopyTo to, std::span<const DeviceCopy> copies);

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
