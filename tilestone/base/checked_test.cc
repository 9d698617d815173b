#include "tilestone/base/checked.h"

#include <gtest/gtest.h>

#include <limits>

#include "tilestone/base/error_testing.h"

namespace tilestone::checked_test {

constexpr int64_t kMaxI = std::numeric_limits<int64_t>::max();
constexpr int64_t kMinI = std::numeric_limits<int64_t>::min();
constexpr uint64_t kMaxU = std::numeric_limits<uint64_t>::max();

TEST(Checked, GivesTheResultUpToTheLimits) {
  EXPECT_EQ(try_add(kMaxI - 1, int64_t{1}), kMaxI);
  EXPECT_EQ(try_add(kMinI + 1, int64_t{-1}), kMinI);
  EXPECT_EQ(try_mul(kMinI / 2, int64_t{2}), kMinI);
  EXPECT_EQ(try_add(kMaxU - 1, uint64_t{1}), kMaxU);
  EXPECT_EQ(try_mul(kMaxU / 5, uint64_t{5}), kMaxU);
  EXPECT_EQ(try_mul(kMaxU, uint64_t{0}), 0u);
}

TEST(Checked, SaysNoPastThem) {
  EXPECT_FALSE(try_add(kMaxI, int64_t{1}));
  EXPECT_FALSE(try_add(kMinI, int64_t{-1}));
  EXPECT_FALSE(try_mul(kMinI, int64_t{-1}));
  EXPECT_FALSE(try_mul(int64_t{1} << 32, int64_t{1} << 31));
  EXPECT_FALSE(try_add(kMaxU, uint64_t{1}));
  EXPECT_FALSE(try_mul(uint64_t{1} << 32, uint64_t{1} << 32));
}

TEST(Checked, TheErrorNamesTheQuantityAndTheValues) {
  EXPECT_THAT(error_of([] { checked_mul(kMaxI, int64_t{2}, "bytes of the box"); }),
              IsError(ErrorCode::kInvalidArgument, "", "bytes of the box",
                      "9223372036854775807 * 2", "64 bits"));
  EXPECT_THROW(checked_add(kMaxI, int64_t{1}, "x"), Error);
  EXPECT_THROW(checked_add(kMaxU, uint64_t{1}, "x"), Error);
  EXPECT_THROW(checked_mul(kMaxU, uint64_t{2}, "x"), Error);
  EXPECT_EQ(checked_add(int64_t{2}, int64_t{3}, "x"), 5);
  EXPECT_EQ(checked_add(uint64_t{2}, uint64_t{3}, "x"), 5u);
  EXPECT_EQ(checked_mul(int64_t{2}, int64_t{-3}, "x"), -6);
  EXPECT_EQ(checked_mul(uint64_t{2}, uint64_t{3}, "x"), 6u);
}

TEST(AlignUp, RoundsUpToMultiples) {
  EXPECT_EQ(align_up(0, 64), 0u);
  EXPECT_EQ(align_up(1, 64), 64u);
  EXPECT_EQ(align_up(64, 64), 64u);
  EXPECT_EQ(align_up(65, 64), 128u);
  EXPECT_EQ(align_up((uint64_t{1} << 40) + 1, 4096), (uint64_t{1} << 40) + 4096);
}

}  // namespace tilestone::checked_test
