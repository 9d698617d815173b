// Which element types a load with `cast` converts to which.
#pragma once

#include "tilestone/base/dtype.h"

namespace tilestone {

// Not complex to real numbers, which would lose the imaginary part, and not from or to pairs of 4
// bits. Every dtype converts to itself.
bool is_convertible(DType from, DType to);

}  // namespace tilestone
