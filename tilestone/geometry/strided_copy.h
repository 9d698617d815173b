// Copies between strided tensors in host memory. Dims are coalesced, and long runs are copied at
// memcpy speed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tilestone/base/bytes.h"
#include "tilestone/geometry/box.h"

namespace tilestone {

// A strided tensor in memory. `strides` has one entry per dim of `shape`, in elements, of any sign.
// `data` points to element [0, ..., 0]. A pair of 4-bit elements counts as one 1-byte element.
struct StridedView {
  std::byte* data = nullptr;
  Dims shape;
  Dims strides;
  uint64_t itemsize = 1;  // bytes

  static StridedView contiguous(std::byte* data, const Dims& shape, uint64_t itemsize);
  bool is_contiguous() const;  // C order without gaps; dims of size 1 don't matter
  // The part of the view inside `box`, which is in the view's own coordinates and within its
  // bounds.
  StridedView narrow(const Box& box) const;
  uint64_t bytes() const;  // numel * itemsize
};

// Copies every element of `source` to the element of `target` with the same index. Throws
// Error(kInternal) unless shapes and item sizes are equal. The memory must not overlap.
void strided_copy(const StridedView& target, const StridedView& source);

// Packs part of a strided tensor into contiguous memory: writes bytes [begin, begin + out.size())
// of the flattened C-contiguous tensor to `out`. The range need not consist of whole elements.
// Throws Error(kInternal) if it exceeds the tensor.
void pack_range(const StridedView& source, uint64_t begin, MutableByteView out);
// As pack_range(). Also continues the CRC-32 `seed` over the bytes written, while they are in the
// cache, and returns it.
uint32_t pack_range_crc32(const StridedView& source, uint64_t begin, MutableByteView out,
                          uint32_t seed);

}  // namespace tilestone
