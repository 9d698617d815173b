// Maps bytes between a tensor and a larger tensor that contains it in its first corner. Both are
// C-contiguous. The rest of the larger tensor is zeros. A chunk whose grid cell extends beyond the
// tensor is stored like this.
#pragma once

#include <cstdint>

#include "tilestone/base/bytes.h"
#include "tilestone/geometry/box.h"

namespace tilestone {

class Padding {
 public:
  // `padded` has as many dims as `shape`, and no dim of it is smaller. `itemsize` is in bytes. The
  // byte size of each tensor must fit an int64.
  Padding(const Dims& shape, const Dims& padded, uint64_t itemsize);

  uint64_t padded_bytes() const { return padded_bytes_; }  // of the larger tensor

  // A half-open range of bytes.
  struct Inner {
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  // The bytes of the smaller tensor that lie in bytes [begin, end) of the larger one. They are
  // always one range, because both tensors have their elements in the same order.
  Inner inside(uint64_t begin, uint64_t end) const;
  // `out` represents the bytes of the larger tensor from `begin` on. On entry, the bytes that
  // inside() returns for this range are at the front of `out`. They are moved to their places, and
  // all other bytes become zero.
  void spread(uint64_t begin, MutableByteView out) const;

 private:
  uint64_t before(uint64_t at) const;  // bytes of the smaller tensor before byte `at` of the larger

  // A block is contiguous in both tensors: the elements of the last padded dim and of all dims
  // after it.
  uint64_t block_ = 0;         // bytes
  uint64_t padded_block_ = 0;  // bytes from one block's start to the next in the larger tensor
  Dims counts_;                // number of blocks of the smaller tensor in each outer dim
  Dims padded_counts_;         // the same for the larger tensor
  uint64_t bytes_ = 0;         // of the smaller tensor
  uint64_t padded_bytes_ = 0;
};

}  // namespace tilestone
