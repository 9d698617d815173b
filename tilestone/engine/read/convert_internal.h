// Element conversion between dtypes, for loads with `cast`.
//
// To floating point: correctly rounded, ties to even; beyond the target's range infinity where it
// has one, the largest number for float8_e4m3fn, NaN for the "fnuz" types: what torch gives. (Only
// what torch rounds twice, float64 and large integers by way of float32, may differ, in the last
// bit of a tie.) To integers: from floating point truncated towards zero, saturated, NaN is 0;
// from integers modulo 2^bits, as torch does. To bool: not zero. To complex: the imaginary part of
// a real number is 0. float8_e8m0fnu holds powers of two; the sign is lost.
#pragma once

#include "tilestone/base/dtype.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {

// Equal shapes and convertible dtypes (base/convertible.h), whose item sizes the views have.
void convert(const StridedView& target, DType to, const StridedView& source, DType from);

}  // namespace tilestone::engine
