// Conversion of 16-bit and 8-bit floating-point types to and from double, which holds each of their
// values exactly.
#pragma once

#include <cstdint>

namespace tilestone::engine {

// Bits from the top: sign, exponent, mantissa. Subnormals as in IEEE 754.
struct MiniFloat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  uint32_t max_finite;  // bits without sign
  uint32_t overflow;    // bits without sign of larger values: infinity, NaN or max_finite
  uint32_t nan;         // bits without sign
  bool unsigned_zero;   // "fnuz": the pattern of -0 is the only NaN
};

inline constexpr MiniFloat kHalf{5, 10, 15, 0x7BFF, 0x7C00, 0x7E00, false};
inline constexpr MiniFloat kBrain{8, 7, 127, 0x7F7F, 0x7F80, 0x7FC0, false};
inline constexpr MiniFloat kE4M3FN{4, 3, 7, 0x7E, 0x7E, 0x7F, false};
inline constexpr MiniFloat kE5M2{5, 2, 15, 0x7B, 0x7C, 0x7F, false};
inline constexpr MiniFloat kE4M3FNUZ{4, 3, 8, 0x7F, 0x80, 0x80, true};
inline constexpr MiniFloat kE5M2FNUZ{5, 2, 16, 0x7F, 0x80, 0x80, true};

double decode(const MiniFloat& type, uint32_t bits);
uint32_t encode(const MiniFloat& type, double value);  // ties to even; a NaN keeps its sign

// float8_e8m0fnu: 2^(bits - 127); 255 is NaN. Ties are rounded up, as in torch, and so is
// everything between 2^-127 and 2^-126.
double decode_e8m0(uint8_t bits);
uint8_t encode_e8m0(double value);

}  // namespace tilestone::engine
