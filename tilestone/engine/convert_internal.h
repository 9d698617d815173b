// Element conversion between dtypes, for loads with `cast`.
//
// To floating point: correctly rounded, ties to even; beyond the target's range infinity, or NaN
// where it has none. To integers: from floating point truncated towards zero, saturated, NaN is 0;
// from integers modulo 2^bits, as torch does. To bool: not zero. To complex: the imaginary part of
// a real number is 0. float8_e8m0fnu holds powers of two; the sign is lost.
#pragma once

#include "tilestone/base/dtype.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {

// Throws Error(kUnsupported) for complex to real and for 4-bit pairs.
void check_convertible(DType from, DType to);

// Equal shapes; the views' item sizes are those of the dtypes.
void convert(const StridedView& target, DType to, const StridedView& source, DType from);

}  // namespace tilestone::engine
