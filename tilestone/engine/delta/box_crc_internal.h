// The CRC-32 of a tensor whose elements are in several places.
//
// Without its inversions at both ends, a CRC-32 is linear: that of a text is the XOR of those of
// texts with zeros in the place of what the others have. So each box of a tensor has a portion,
// which needs only the box, and the XOR of the portions of boxes that cover the tensor once is the
// CRC-32 of its bytes in C order, however it is sharded.
#pragma once

#include <cstdint>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/geometry/box.h"

namespace tilestone::engine {

// The portion of a box whose elements are passed in C order, in parts of any sizes.
class BoxCrc {
 public:
  // The box is inside the tensor.
  BoxCrc(const Box& box, const Dims& shape, uint64_t itemsize);
  void add(ByteView elements);
  uint32_t portion() const;  // 0 if nothing was added

 private:
  Dims counts_;                 // of the dims that choose a run: contiguous in the tensor
  Dims index_;                  // of the run
  std::vector<uint64_t> gaps_;  // by dim: appends the zeros before a run that differs in it
  uint64_t run_ = 0;            // bytes
  uint64_t left_ = 0;           // of the run
  uint64_t rest_ = 0;           // bytes of the tensor after the last run
  uint32_t crc_ = ~uint32_t{0};
};
uint32_t crc_portion(ByteView elements, const Box& box, const Dims& shape, uint64_t itemsize);

// The CRC-32 of a tensor of so many bytes, from the XOR of its portions.
uint32_t crc_of_portions(uint32_t portions, uint64_t bytes);

}  // namespace tilestone::engine
