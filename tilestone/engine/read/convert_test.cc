#include "tilestone/engine/read/convert_internal.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tilestone/base/dtype.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/mini_float_internal.h"

namespace tilestone::engine::convert_test {

constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename To, typename From>
To converted(DType to, DType from, From value) {
  To result{};
  convert({reinterpret_cast<std::byte*>(&result), {}, {}, sizeof result}, to,
          {reinterpret_cast<std::byte*>(&value), {}, {}, sizeof value}, from);
  return result;
}

TEST(Convert, EverySmallFloatSurvivesTheWayThroughDouble) {
  for (const MiniFloat* type : {&kHalf, &kBrain, &kE4M3FN, &kE5M2, &kE4M3FNUZ, &kE5M2FNUZ}) {
    const uint32_t values = 1u << (1 + type->exponent_bits + type->mantissa_bits);
    for (uint32_t bits = 0; bits < values; ++bits) {
      const double value = decode(*type, bits);
      if (std::isnan(value)) continue;
      ASSERT_EQ(encode(*type, value), bits) << value;
    }
  }
  for (uint32_t bits = 0; bits < 255; ++bits) {
    EXPECT_EQ(encode_e8m0(decode_e8m0(static_cast<uint8_t>(bits))), bits);
  }
}

TEST(Convert, BetweenTwoNeighboursTheNearerAndOnATieTheEvenOneIsTaken) {
  for (const MiniFloat* type : {&kHalf, &kBrain, &kE4M3FN, &kE5M2}) {
    for (uint32_t bits = 0; bits < type->max_finite; ++bits) {
      const double low = decode(*type, bits), high = decode(*type, bits + 1);
      const double middle = (low + high) / 2;
      ASSERT_EQ(encode(*type, middle), bits + (bits & 1)) << middle;
      ASSERT_EQ(encode(*type, std::nextafter(middle, -kInf)), bits) << middle;
      ASSERT_EQ(encode(*type, std::nextafter(middle, kInf)), bits + 1) << middle;
    }
  }
}

TEST(Convert, BeyondTheRangeIsInfinityTheLargestNumberOrNanAsInTorch) {
  EXPECT_EQ(encode(kHalf, 65520), 0x7C00u);
  EXPECT_EQ(encode(kHalf, 65519.99), 0x7BFFu);
  EXPECT_EQ(encode(kHalf, -1e300), 0xFC00u);
  EXPECT_EQ(encode(kE4M3FN, 1e9), 0x7Eu);
  EXPECT_EQ(encode(kE4M3FN, -464.01), 0xFEu);
  EXPECT_EQ(encode(kE4M3FN, -kInf), 0xFEu);
  EXPECT_EQ(encode(kE5M2, kInf), 0x7Cu);
  EXPECT_EQ(encode(kE4M3FNUZ, -1e9), 0x80u);
  EXPECT_EQ(encode(kE4M3FNUZ, -1e-30), 0u);
}

TEST(Convert, NanKeepsItsSign) {
  for (const MiniFloat* type : {&kHalf, &kBrain, &kE4M3FN, &kE5M2}) {
    const uint32_t sign_bit = 1u << (type->exponent_bits + type->mantissa_bits);
    EXPECT_EQ(encode(*type, decode(*type, type->nan)), type->nan);
    EXPECT_EQ(encode(*type, decode(*type, sign_bit | type->nan)), sign_bit | type->nan);
  }
  EXPECT_EQ(encode(kE5M2FNUZ, decode(kE5M2FNUZ, 0x80)), 0x80u);
}

TEST(Convert, PowersOfTwoRoundAsTorchsDo) {
  EXPECT_EQ(encode_e8m0(1.5), 128);
  EXPECT_EQ(encode_e8m0(std::nextafter(1.5, 0)), 127);
  EXPECT_EQ(encode_e8m0(std::ldexp(1.0, -127)), 0);
  EXPECT_EQ(encode_e8m0(std::ldexp(1.1, -127)), 1);
  EXPECT_EQ(encode_e8m0(std::ldexp(1.9, -128)), 0);
}

TEST(Convert, FloatsOfTheMachineAgree) {
  EXPECT_EQ((converted<double, float>(DType::kFloat64, DType::kFloat32, 1.25f)), 1.25);
  EXPECT_EQ((converted<float, double>(DType::kFloat32, DType::kFloat64, 0.1)), 0.1f);
  EXPECT_EQ((converted<uint16_t, float>(DType::kBFloat16, DType::kFloat32, 1.0f)), 0x3F80);
  EXPECT_EQ((converted<float, uint16_t>(DType::kFloat32, DType::kFloat16, uint16_t{0x3C00})), 1.0f);
}

TEST(Convert, IntegersKeepEveryBitAndWrap) {
  const int64_t large = (int64_t{1} << 62) + 1;
  EXPECT_EQ((converted<uint64_t, int64_t>(DType::kUInt64, DType::kInt64, large)),
            static_cast<uint64_t>(large));
  EXPECT_EQ((converted<uint8_t, int32_t>(DType::kUInt8, DType::kInt32, 300)), 44);
  EXPECT_EQ((converted<int64_t, int8_t>(DType::kInt64, DType::kInt8, int8_t{-3})), -3);
  EXPECT_EQ((converted<uint8_t, int32_t>(DType::kBool, DType::kInt32, 256)), 1);
}

TEST(Convert, AnIntegerIsRoundedOnce) {
  // A tie at 8 bits except for the last bit, which rounding to 53 bits would lose.
  const int64_t value = (int64_t{1} << 60) + (int64_t{1} << 52) + 1;
  const auto bits = converted<uint16_t, int64_t>(DType::kBFloat16, DType::kInt64, value);
  EXPECT_EQ(decode(kBrain, bits), std::ldexp(1.0, 60) + std::ldexp(1.0, 53));
  EXPECT_EQ((converted<double, uint64_t>(DType::kFloat64, DType::kUInt64, ~uint64_t{0})),
            18446744073709551616.0);
}

TEST(Convert, RealsToIntegersAreTruncatedAndSaturate) {
  EXPECT_EQ((converted<int32_t, double>(DType::kInt32, DType::kFloat64, -2.9)), -2);
  EXPECT_EQ((converted<int8_t, double>(DType::kInt8, DType::kFloat64, 1e9)), 127);
  EXPECT_EQ((converted<int8_t, double>(DType::kInt8, DType::kFloat64, -1e9)), -128);
  EXPECT_EQ((converted<uint16_t, double>(DType::kUInt16, DType::kFloat64, -5.0)), 0);
  EXPECT_EQ((converted<int64_t, double>(DType::kInt64, DType::kFloat64, kInf)),
            std::numeric_limits<int64_t>::max());
  EXPECT_EQ((converted<int64_t, double>(DType::kInt64, DType::kFloat64, std::nan(""))), 0);
  EXPECT_EQ((converted<uint8_t, double>(DType::kBool, DType::kFloat64, 0.25)), 1);
  EXPECT_EQ((converted<uint8_t, double>(DType::kBool, DType::kFloat64, std::nan(""))), 1);
}

TEST(Convert, ComplexKeepsBothPartsAndIsNotCutToReal) {
  struct Pair {
    float real, imaginary;
  };
  struct Wide {
    double real, imaginary;
  };
  const auto wide = converted<Wide, Pair>(DType::kComplex128, DType::kComplex64, Pair{1.5f, -2.0f});
  EXPECT_EQ(wide.real, 1.5);
  EXPECT_EQ(wide.imaginary, -2.0);
  const auto real = converted<Pair, int32_t>(DType::kComplex64, DType::kInt32, 7);
  EXPECT_EQ(real.real, 7.0f);
  EXPECT_EQ(real.imaginary, 0.0f);
  EXPECT_FALSE(is_convertible(DType::kComplex64, DType::kFloat32));
  EXPECT_FALSE(is_convertible(DType::kFloat4E2M1FNX2, DType::kFloat32));
}

TEST(Convert, StridedLinesLongerThanOneStep) {
  std::vector<int32_t> source(3 * 1500);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<int32_t>(i);
  std::vector<double> target(source.size());
  convert({reinterpret_cast<std::byte*>(target.data()), {1500, 3}, {3, 1}, 8}, DType::kFloat64,
          {reinterpret_cast<std::byte*>(source.data()), {1500, 3}, {1, 1500}, 4}, DType::kInt32);
  for (size_t i = 0; i < 1500; ++i) {
    for (size_t j = 0; j < 3; ++j) ASSERT_EQ(target[i * 3 + j], static_cast<double>(i + j * 1500));
  }
}

}  // namespace tilestone::engine::convert_test
