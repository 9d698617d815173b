#include "tilestone/engine/delta/box_crc_internal.h"

#include <zlib.h>

#include <algorithm>

#include "tilestone/base/checksum.h"

namespace tilestone::engine {
namespace {

uint32_t with_zeros(uint32_t linear, uint64_t zeros) { return crc32_combine(linear, 0, zeros); }

}  // namespace

BoxCrc::BoxCrc(const Box& box, const Dims& shape, uint64_t itemsize) : run_(itemsize) {
  size_t dims = box.rank();
  for (; dims > 0; --dims) {
    run_ *= static_cast<uint64_t>(box.shape[dims - 1]);
    if (box.shape[dims - 1] == shape[dims - 1]) continue;
    --dims;
    break;
  }
  left_ = run_;
  counts_ = Dims(std::span(box.shape.begin(), dims));
  index_ = Dims(dims, 0);
  gaps_.resize(dims);
  const Dims strides = contiguous_strides(shape);
  uint64_t reached = run_;  // bytes from the first run of these dims to the end of their last one
  for (size_t d = dims; d-- > 0;) {
    const uint64_t step = static_cast<uint64_t>(strides[d]) * itemsize;
    gaps_[d] = crc32_combine_gen64(static_cast<z_off64_t>(step - reached));
    reached += static_cast<uint64_t>(box.shape[d] - 1) * step;
  }
  uint64_t before = 0;
  for (size_t d = 0; d < box.rank(); ++d) {
    before += static_cast<uint64_t>(box.offset[d] * strides[d]) * itemsize;
  }
  rest_ = static_cast<uint64_t>(numel(shape)) * itemsize - before - reached;
}

void BoxCrc::add(ByteView elements) {
  while (!elements.empty()) {
    if (left_ == 0) {
      size_t dim = counts_.size() - 1;
      for (; ++index_[dim] == counts_[dim]; --dim) index_[dim] = 0;
      crc_ = ~static_cast<uint32_t>(crc32_combine_op(~crc_, 0, gaps_[dim]));
      left_ = run_;
    }
    const uint64_t size = std::min<uint64_t>(left_, elements.size());
    crc_ = crc32(elements.first(size), crc_);
    elements = elements.subspan(size);
    left_ -= size;
  }
}

uint32_t BoxCrc::portion() const { return with_zeros(~crc_, rest_); }

uint32_t crc_portion(ByteView elements, const Box& box, const Dims& shape, uint64_t itemsize) {
  if (elements.empty()) return 0;
  BoxCrc crc(box, shape, itemsize);
  crc.add(elements);
  return crc.portion();
}

uint32_t crc_of_portions(uint32_t portions, uint64_t bytes) {
  return ~(portions ^ with_zeros(~uint32_t{0}, bytes));
}

}  // namespace tilestone::engine
