// A tensor in a corner of a larger one: where the bytes of the one lie in the other. Both are
// C-contiguous; what the larger one has more is zeros. How a chunk is stored whose cell reaches
// beyond the tensor.
#pragma once

#include <cstdint>

#include "tilestone/base/bytes.h"
#include "tilestone/geometry/dims.h"

namespace tilestone {

class Padding {
 public:
  // `padded` has as many dims as `shape`, none of them smaller; itemsize in bytes. The bytes of
  // both fit an int64.
  Padding(const Dims& shape, const Dims& padded, uint64_t itemsize);

  uint64_t padded_bytes() const { return padded_bytes_; }  // of the larger tensor

  // A range of bytes, half-open.
  struct Inner {
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  // The bytes of the smaller tensor that lie in bytes [begin, end) of the larger one: always one
  // range, since both have their elements in the same order.
  Inner inside(uint64_t begin, uint64_t end) const;
  // `out` stands for the bytes of the larger tensor from `begin` on. At its front are the bytes
  // that inside() names; they are moved to where they belong, and everything else becomes zero.
  void spread(uint64_t begin, MutableByteView out) const;

 private:
  uint64_t before(uint64_t at) const;  // bytes of the smaller tensor before byte `at` of the larger

  // Blocks that are contiguous in both tensors, and the dims that count them.
  uint64_t block_ = 0;  // bytes
  uint64_t padded_block_ =
      0;         // bytes from one block's start to the next one's in the larger tensor
  Dims counts_;  // blocks of the smaller tensor, by dim
  Dims padded_counts_;
  uint64_t bytes_ = 0;  // of the smaller tensor
  uint64_t padded_bytes_ = 0;
};

}  // namespace tilestone
