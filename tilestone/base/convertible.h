// Defines the conversions between element types that a load with `cast` makes.
#pragma once

#include "tilestone/base/dtype.h"

namespace tilestone {

// Every dtype converts to itself. Complex numbers do not convert to real ones, which would lose the
// imaginary part. kFloat4E2M1FNX2 (pairs of 4-bit floats) converts to and from no other dtype. All
// other pairs convert.
bool is_convertible(DType from, DType to);

}  // namespace tilestone
