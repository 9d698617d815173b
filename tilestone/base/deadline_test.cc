#include "tilestone/base/deadline.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

namespace tilestone::deadline_test {

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

TEST(Deadline, AnInterruptIsThrownByItsFirstReasonAndKeepsWaitsShort) {
  const auto interrupt = std::make_shared<Interrupt>();
  const Deadline deadline = Deadline::never().with_interrupt(interrupt);
  EXPECT_FALSE(deadline.expired());
  EXPECT_LE(deadline.wait_time(), 50ms);
  EXPECT_EQ(deadline.remaining(), 24h);
  interrupt->request(std::make_exception_ptr(std::runtime_error("first")));
  interrupt->request(std::make_exception_ptr(std::runtime_error("second")));
  for (const Deadline& each : {deadline, deadline.sooner(0.5)}) {
    try {
      static_cast<void>(each.expired());
      FAIL() << "the interrupt was not thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "first");
    }
  }
  EXPECT_FALSE(deadline.without_interrupt().expired());
  EXPECT_EQ(Deadline::after(1h).sooner(0.5).wait_time() > 50ms, true);
}

}  // namespace tilestone::deadline_test
