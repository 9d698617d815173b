#include "tilestone/state/tensor_view.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/huge_pages.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone {
namespace {

constexpr uint64_t kAlignment = 64;  // bytes, for memory from allocate()

// The size of a contiguous tensor in bytes. Throws on negative dims and on overflow.
uint64_t checked_bytes(DType dtype, const Dims& shape) {
  return checked_mul(static_cast<uint64_t>(numel(shape)), itemsize(dtype), "bytes of the tensor");
}

// The lowest and highest elements that a strided tensor touches, relative to element [0, ..., 0].
struct Reach {
  int64_t lowest = 0;
  int64_t highest = 0;
};

Reach reach_of(const Dims& shape, const Dims& strides) {
  Reach reach;
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t step = checked_mul(shape[d] - 1, strides[d], "stride times dim");
    int64_t& end = step < 0 ? reach.lowest : reach.highest;
    end = checked_add(end, step, "reach of the strides");
  }
  return reach;
}

void check_inside(const void* data, DType dtype, const Dims& shape, const Dims& strides,
                  const void* begin, uint64_t bytes) {
  const auto size = static_cast<int64_t>(itemsize(dtype));
  const auto allocation = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin));
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data)) - allocation;
  const Reach reach = reach_of(shape, strides);
  const int64_t low = checked_add(first, checked_mul(reach.lowest, size, "reach"), "reach");
  const int64_t high = checked_add(
      first, checked_mul(checked_add(reach.highest, 1, "reach"), size, "reach"), "reach");
  if (low < 0 || static_cast<uint64_t>(high) > bytes) {
    throw Error(ErrorCode::kInvalidArgument,
                "shape " + to_string(shape) + " and strides " + to_string(strides) + " of " +
                    std::string(to_string(dtype)) + " elements reach bytes [" +
                    std::to_string(low) + ", " + std::to_string(high) +
                    "), but the allocation has " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace

TensorView TensorView::contiguous(void* data, DType dtype, Dims shape,
                                  std::shared_ptr<const void> owner) {
  if (checked_bytes(dtype, shape) > 0 && data == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "data is null for a tensor of shape " + to_string(shape));
  }
  Dims strides = contiguous_strides(shape);
  return {static_cast<std::byte*>(data),
          dtype,
          std::move(shape),
          std::move(strides),
          nullptr,
          std::move(owner)};
}

TensorView TensorView::of_elements(void* data, uint64_t count, DType dtype, Dims shape) {
  if (static_cast<uint64_t>(numel(shape)) != count) {
    throw Error(ErrorCode::kInvalidArgument, "a tensor of shape " + to_string(shape) + " has " +
                                                 std::to_string(numel(shape)) + " elements, but " +
                                                 std::to_string(count) + " were given");
  }
  return contiguous(data, dtype, std::move(shape));
}

TensorView TensorView::strided(void* data, DType dtype, Dims shape, Dims strides, const void* begin,
                               uint64_t bytes, std::shared_ptr<const void> owner) {
  if (strides.size() != shape.size()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "strides " + to_string(strides) + " don't have as many dims as shape " + to_string(shape));
  }
  if (checked_bytes(dtype, shape) > 0) {
    if (data == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "data is null for a tensor of shape " + to_string(shape));
    }
    check_inside(data, dtype, shape, strides, begin, bytes);
  }
  return {static_cast<std::byte*>(data),
          dtype,
          std::move(shape),
          std::move(strides),
          nullptr,
          std::move(owner)};
}

TensorView TensorView::without_data(DType dtype, Dims shape) {
  checked_bytes(dtype, shape);
  Dims strides = contiguous_strides(shape);
  return {nullptr, dtype, std::move(shape), std::move(strides), nullptr, nullptr};
}

TensorView TensorView::allocate(DType dtype, Dims shape) {
  const uint64_t bytes = checked_bytes(dtype, shape);
  const uint64_t size = checked_add(bytes, kAlignment, "bytes to allocate");
  // calloc gets pages from the kernel that are already zero, so this does not write to them.
  std::shared_ptr<void> memory(std::calloc(size, 1), std::free);
  if (memory == nullptr) throw std::bad_alloc();
  prefer_huge_pages(memory.get(), size);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  void* data = static_cast<std::byte*>(memory.get()) + (kAlignment - address % kAlignment);
  return contiguous(data, dtype, std::move(shape), std::move(memory));
}

uint64_t TensorView::bytes() const { return checked_bytes(dtype, shape); }

TensorView TensorView::narrow(const Box& box) const {
  check_bounds(box, shape);
  TensorView part = *this;
  part.shape = box.shape;
  if (device != nullptr) {
    if (box.shape != shape) part.device = device->narrow(box);
    part.strides = contiguous_strides(box.shape);
    return part;
  }
  if (data == nullptr || box.empty()) return part;
  int64_t elements = 0;
  for (size_t d = 0; d < box.rank(); ++d) elements += box.offset[d] * strides[d];
  part.data = data + elements * static_cast<int64_t>(itemsize(dtype));
  return part;
}

StridedView TensorView::strided_view() const {
  if (device != nullptr) {
    throw Error(ErrorCode::kInternal,
                "expected a tensor in host memory, but it is in the memory of " + device->device());
  }
  if (!has_data()) {
    throw Error(ErrorCode::kInvalidArgument,
                "a tensor of shape " + to_string(shape) + " has no data");
  }
  return {data, shape, strides, itemsize(dtype)};
}

void TensorView::check_elements(DType wanted) const {
  std::string problem;
  if (dtype != wanted) {
    problem =
        "has " + std::string(to_string(dtype)) + " elements, not " + std::string(to_string(wanted));
  } else if (device != nullptr) {
    problem = "is in the memory of " + device->device() + ", not in host memory";
  } else if (!has_data()) {
    problem = "has no data";
  } else if (!strided_view().is_contiguous()) {
    problem = "is not contiguous: its strides are " + to_string(strides);
  } else {
    return;
  }
  throw Error(ErrorCode::kInvalidArgument, "a tensor of shape " + to_string(shape) + " " + problem);
}

}  // namespace tilestone
