#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "tilestone/engine/read/mini_float_internal.h"

namespace tilestone::engine {
namespace {

constexpr int kDoubleBias = 1023;
constexpr int kDoubleMantissa = 52;

double power_of_two(int exponent) {  // of a normal double
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + kDoubleBias) << kDoubleMantissa);
}

int exponent_of(double magnitude) {  // of a normal double; lower for subnormal ones
  return static_cast<int>(std::bit_cast<uint64_t>(magnitude) >> kDoubleMantissa) - kDoubleBias;
}

}  // namespace

double decode(const MiniFloat& type, uint32_t bits) {
  const uint32_t sign_bit = 1u << (type.exponent_bits + type.mantissa_bits);
  const uint32_t magnitude = bits & (sign_bit - 1);
  const double sign = (bits & sign_bit) != 0 ? -1.0 : 1.0;
  const double nan = std::copysign(std::numeric_limits<double>::quiet_NaN(), sign);
  if (type.unsigned_zero && bits == type.nan) return std::fabs(nan);
  if (magnitude > type.max_finite) {
    const bool infinite = magnitude == type.overflow && type.overflow != type.nan;
    return infinite ? sign * std::numeric_limits<double>::infinity() : nan;
  }
  const auto exponent = static_cast<int>(magnitude >> type.mantissa_bits);
  const uint32_t one = 1u << type.mantissa_bits;
  const uint32_t fraction = magnitude & (one - 1);
  if (exponent == 0) return sign * fraction * power_of_two(1 - type.bias - type.mantissa_bits);
  return sign * (one + fraction) * power_of_two(exponent - type.bias - type.mantissa_bits);
}

// The result is a whole number of quanta of 2^(e - mantissa bits), where e is the value's exponent
// or, if larger, the type's smallest exponent. Scaling by a power of two is exact and nearbyint
// rounds to even. A carry out of the mantissa goes into the exponent bits, which gives the next
// binade.
uint32_t encode(const MiniFloat& type, double value) {
  const uint32_t sign_bit = 1u << (type.exponent_bits + type.mantissa_bits);
  const uint32_t sign = std::signbit(value) ? sign_bit : 0;
  if (std::isnan(value)) return type.unsigned_zero ? type.nan : (sign | type.nan);
  const uint32_t beyond = type.unsigned_zero ? type.overflow : (sign | type.overflow);
  const double magnitude = std::fabs(value);
  const int least = 1 - type.bias;
  const int exponent = std::max(exponent_of(magnitude), least);
  if (exponent > (1 << type.exponent_bits)) return beyond;
  const double quanta = std::nearbyint(magnitude * power_of_two(type.mantissa_bits - exponent));
  const uint32_t bits = (static_cast<uint32_t>(exponent - least) << type.mantissa_bits) +
                        static_cast<uint32_t>(quanta);
  if (bits > type.max_finite) return beyond;
  if (bits == 0 && type.unsigned_zero) return 0;
  return sign | bits;
}

double decode_e8m0(uint8_t bits) {
  if (bits == 255) return std::numeric_limits<double>::quiet_NaN();
  return power_of_two(bits - 127);
}

uint8_t encode_e8m0(double value) {
  constexpr int kMax = 254;
  const double magnitude = std::fabs(value);
  if (std::isnan(value) || std::isinf(value)) return 255;
  int exponent = exponent_of(magnitude);
  if (exponent < -127) return 0;
  // torch rounds numbers above 2^-127 that are subnormal as a float up to 2^-126.
  const bool up = exponent == -127 ? magnitude > power_of_two(exponent)
                                   : magnitude >= 1.5 * power_of_two(exponent);
  if (up) ++exponent;
  return exponent + 127 > kMax ? 255 : static_cast<uint8_t>(exponent + 127);
}

}  // namespace tilestone::engine
