// Copies between strided tensors in host memory: dims are coalesced, long runs go at memcpy's
// speed, large copies over threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tilestone/base/bytes.h"
#include "tilestone/geometry/box.h"

namespace tilestone {

class ThreadPool;

// A box's worth of elements in memory. `strides` are in elements, of any sign, one per dim of
// `shape`; `data` points at element [0, ..., 0]. 4-bit pairs count as one 1-byte element.
struct StridedView {
  std::byte* data = nullptr;
  Dims shape;
  Dims strides;
  uint64_t itemsize = 1;  // bytes

  static StridedView contiguous(std::byte* data, const Dims& shape, uint64_t itemsize);
  bool is_contiguous() const;  // C order without gaps; dims of size 1 don't matter
  // The part of the view that `box` (in the view's own coordinates, inside it) names.
  StridedView narrow(const Box& box) const;
  uint64_t bytes() const;  // numel * itemsize
};

// Copies every element of `source` to the element of `target` with the same index. Equal shapes
// and item sizes (checked, Error(kInternal)); the memory must not overlap. `pool` may be null.
void strided_copy(const StridedView& target, const StridedView& source, ThreadPool* pool = nullptr);

// Packs a strided tensor into contiguous memory piece by piece: bytes [begin, begin + out.size())
// of what the C-contiguous copy of `source` would be. Any byte range, not only whole elements.
void pack_range(const StridedView& source, uint64_t begin, MutableByteView out);
// The inverse: writes `in` to the bytes [begin, begin + in.size()) of the flattened tensor.
void unpack_range(const StridedView& target, uint64_t begin, ByteView in);
// pack_range that continues a CRC-32 over the bytes it writes, while they are in cache.
uint32_t pack_range_crc32(const StridedView& source, uint64_t begin, MutableByteView out,
                          uint32_t seed);

}  // namespace tilestone
