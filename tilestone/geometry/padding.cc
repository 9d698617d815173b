#include "tilestone/geometry/padding.h"

#include <algorithm>
#include <cstring>

namespace tilestone {

// After the last padded dim both tensors are the same, so that dim's elements form one block.
Padding::Padding(const Dims& shape, const Dims& padded, uint64_t itemsize)
    : block_(itemsize), padded_block_(itemsize) {
  size_t dim = shape.size();
  bool differs = false;
  while (dim > 0 && !differs) {
    --dim;
    block_ *= static_cast<uint64_t>(shape[dim]);
    padded_block_ *= static_cast<uint64_t>(padded[dim]);
    differs = shape[dim] != padded[dim];
  }
  bytes_ = block_;
  padded_bytes_ = padded_block_;
  for (size_t d = 0; d < dim; ++d) {
    counts_.push_back(shape[d]);
    padded_counts_.push_back(padded[d]);
    bytes_ *= static_cast<uint64_t>(shape[d]);
    padded_bytes_ *= static_cast<uint64_t>(padded[d]);
  }
}

// Counts whole blocks dim by dim, outermost first. An index outside the smaller tensor means that
// all of its bytes at this level come before `at`.
uint64_t Padding::before(uint64_t at) const {
  if (at >= padded_bytes_) return bytes_;
  uint64_t found = 0;
  uint64_t below = bytes_;  // bytes of the smaller tensor below one index of the dim
  uint64_t padded_below = padded_bytes_;
  for (size_t d = 0; d < counts_.size(); ++d) {
    const auto count = static_cast<uint64_t>(counts_[d]);
    if (count == 0) return 0;
    below /= count;
    padded_below /= static_cast<uint64_t>(padded_counts_[d]);
    const uint64_t index = at / padded_below;
    if (index >= count) return found + below * count;
    found += below * index;
    at -= padded_below * index;
  }
  return found + std::min(at, block_);
}

Padding::Inner Padding::inside(uint64_t begin, uint64_t end) const {
  return {before(begin), before(end)};
}

// Works from the back, because no byte moves towards the front.
void Padding::spread(uint64_t begin, MutableByteView out) const {
  uint64_t end = out.size();  // all bytes from here on are in place
  uint64_t left = before(begin + out.size()) - before(begin);  // bytes still at the front
  while (end > 0) {
    // The block of the last byte, clipped to `out`.
    const uint64_t last = begin + end - 1;
    const uint64_t block_begin = std::max(begin, last - last % padded_block_);
    const uint64_t size = before(begin + end) - before(block_begin);
    const uint64_t to = block_begin - begin;
    left -= size;
    std::memmove(out.data() + to, out.data() + left, size);
    std::memset(out.data() + to + size, 0, end - to - size);
    end = to;
  }
}

}  // namespace tilestone
