#include "tilestone/base/deadline.h"

#include <gtest/gtest.h>

#include <limits>

namespace tilestone {
namespace {

using namespace std::chrono_literals;
using Seconds = std::chrono::duration<double>;

TEST(Deadline, NeverDoesNotExpireAndCanBeWaitedFor) {
  EXPECT_TRUE(Deadline::never().is_never());
  EXPECT_FALSE(Deadline::never().expired());
  EXPECT_EQ(Deadline::never().remaining(), 24h);
}

TEST(Deadline, NoTimeOrLessIsAlreadyExpired) {
  for (const double seconds : {0.0, -1.0, -1e300, std::numeric_limits<double>::quiet_NaN()}) {
    const Deadline deadline = Deadline::after(Seconds(seconds));
    EXPECT_TRUE(deadline.expired()) << seconds;
    EXPECT_EQ(deadline.remaining(), 0ns) << seconds;
  }
}

TEST(Deadline, LiesTheTimeAskedForAhead) {
  const auto before = Deadline::Clock::now();
  const Deadline deadline = Deadline::after(1h);
  const auto after = Deadline::Clock::now();
  EXPECT_FALSE(deadline.expired());
  EXPECT_GE(deadline.when(), before + 1h);
  EXPECT_LE(deadline.when(), after + 1h);
  EXPECT_LE(deadline.remaining(), 1h);
}

TEST(Deadline, TimesPastTheClockAreNever) {
  EXPECT_TRUE(Deadline::after(Seconds(1e30)).is_never());
  EXPECT_TRUE(Deadline::after(Seconds(std::numeric_limits<double>::infinity())).is_never());
}

TEST(Deadline, SoonerIsAPartOfWhatRemains) {
  const Deadline deadline = Deadline::after(1h);
  const Deadline half = deadline.sooner(0.5);
  EXPECT_LT(half.when(), deadline.when() - 29min);
  EXPECT_GT(half.when(), Deadline::Clock::now());
  EXPECT_TRUE(Deadline::never().sooner(0.5).is_never());
  EXPECT_TRUE(Deadline::after(0s).sooner(0.5).expired());
}

}  // namespace
}  // namespace tilestone
