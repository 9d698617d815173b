// For tests: the inverse of pack_range(), element by element.
#pragma once

#include "tilestone/geometry/strided_copy.h"

namespace tilestone {

// Writes `in` to bytes [begin, begin + in.size()) of the flattened tensor, which has as many.
void unpack_range(const StridedView& target, uint64_t begin, ByteView in);

}  // namespace tilestone
