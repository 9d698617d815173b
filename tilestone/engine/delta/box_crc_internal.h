// The CRC-32 of a tensor whose elements are in several places.
//
// Without its inversions at both ends, a CRC-32 is linear: that of a text is the XOR of those of
// texts with zeros in the place of what the others have. So each box of a tensor has a portion,
// which needs only the box, and the XOR of the portions of boxes that cover the tensor once is the
// CRC-32 of its bytes in C order, however it is sharded.
#pragma once

#include <cstdint>

#include "tilestone/base/bytes.h"
#include "tilestone/geometry/box.h"

namespace tilestone::engine {

// `elements`: of the box, in C order. The box is inside the tensor.
uint32_t crc_portion(ByteView elements, const Box& box, const Dims& shape, uint64_t itemsize);

// The CRC-32 of a tensor of so many bytes, from the XOR of its portions.
uint32_t crc_of_portions(uint32_t portions, uint64_t bytes);

}  // namespace tilestone::engine
