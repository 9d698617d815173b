#include "tilestone/engine/delta/box_crc_internal.h"

#include <array>
#include <map>

#include "tilestone/base/checksum.h"

namespace tilestone::engine {
namespace {

uint32_t linear_crc(ByteView bytes) { return ~crc32(bytes, ~uint32_t{0}); }

uint32_t with_zeros(uint32_t linear, uint64_t zeros) { return crc32_combine(linear, 0, zeros); }

// Appends the same number of zeros to many texts.
class Zeros {
 public:
  explicit Zeros(uint64_t count) {
    std::array<uint32_t, 32> of_bit{};
    for (size_t bit = 0; bit < of_bit.size(); ++bit) {
      of_bit[bit] = with_zeros(uint32_t{1} << bit, count);
    }
    for (size_t byte = 0; byte < table_.size(); ++byte) {
      for (size_t value = 0; value < 256; ++value) {
        for (size_t bit = 0; bit < 8; ++bit) {
          if ((value >> bit & 1) != 0) table_[byte][value] ^= of_bit[8 * byte + bit];
        }
      }
    }
  }
  uint32_t append(uint32_t linear) const {
    return table_[0][linear & 0xff] ^ table_[1][linear >> 8 & 0xff] ^
           table_[2][linear >> 16 & 0xff] ^ table_[3][linear >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> table_{};
};

// The dims before this one choose a run: elements that are contiguous in the tensor.
size_t first_dim_of_runs(const Box& box, const Dims& shape) {
  size_t dim = box.rank();
  while (dim > 0 && box.shape[dim - 1] == shape[dim - 1]) --dim;
  return dim > 0 ? dim - 1 : 0;
}

}  // namespace

uint32_t crc_portion(ByteView elements, const Box& box, const Dims& shape, uint64_t itemsize) {
  if (elements.empty()) return 0;
  const size_t dims = first_dim_of_runs(box, shape);
  const Dims strides = contiguous_strides(shape);
  uint64_t runs = 1, first = 0;
  for (size_t d = 0; d < dims; ++d) runs *= static_cast<uint64_t>(box.shape[d]);
  for (size_t d = 0; d < box.rank(); ++d) {
    first += static_cast<uint64_t>(box.offset[d] * strides[d]) * itemsize;
  }
  const uint64_t run = elements.size() / runs;  // bytes
  const uint64_t total = static_cast<uint64_t>(numel(shape)) * itemsize;
  std::map<uint64_t, Zeros> zeros;  // by their number: one for each dim
  Dims index(dims, 0);
  uint64_t begin = first, end = first + run;
  uint32_t portion = linear_crc(elements.first(run));
  for (uint64_t i = 1; i < runs; ++i) {
    for (size_t d = dims; d-- > 0;) {
      begin += static_cast<uint64_t>(strides[d]) * itemsize;
      if (++index[d] < box.shape[d]) break;
      begin -= static_cast<uint64_t>(index[d] * strides[d]) * itemsize;
      index[d] = 0;
    }
    const uint64_t step = begin + run - end;
    end += step;
    portion = zeros.try_emplace(step, step).first->second.append(portion) ^
              linear_crc(elements.subspan(i * run, run));
  }
  return with_zeros(portion, total - end);
}

uint32_t crc_of_portions(uint32_t portions, uint64_t bytes) {
  return ~(portions ^ with_zeros(~uint32_t{0}, bytes));
}

}  // namespace tilestone::engine
