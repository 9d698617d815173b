// Element conversion between dtypes, for loads with `cast`.
//
// To floating point: correctly rounded, ties to even. A value beyond the target's range becomes
//   infinity if the type has one, the largest number for float8_e4m3fn, NaN for the "fnuz" types.
//   These are torch's results, except that torch rounds float64 and large integers twice (through
//   float32): there the last bit of a tie may differ.
// To integers: floating point is truncated towards zero and saturated, and NaN becomes 0; integers
//   are taken modulo 2^bits, as in torch.
// To bool: whether the value is not zero.
// To complex: the imaginary part of a real number is 0.
// float8_e8m0fnu holds only powers of two; the sign is lost.
#pragma once

#include "tilestone/base/dtype.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {

// The views must have equal shapes, and item sizes that match `to` and `from`. The dtypes must be
// convertible (base/dtype.h). Error(kInternal) otherwise.
void convert(const StridedView& target, DType to, const StridedView& source, DType from);

}  // namespace tilestone::engine
