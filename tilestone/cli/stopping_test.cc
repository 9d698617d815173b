#include "tilestone/cli/stopping.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <thread>

namespace tilestone::cli::stopping_test {

using std::chrono::milliseconds;

// Waits until the interrupt is requested, as everything does that the library waits for.
void wait_for(const std::shared_ptr<const Interrupt>& interrupt) {
  const Deadline deadline = Deadline::never().with_interrupt(interrupt);
  while (!deadline.expired()) std::this_thread::sleep_for(milliseconds(1));
}

// Gives a signal its default action, which the program that started the tests may have changed.
class DefaultAction {
 public:
  explicit DefaultAction(int number) : number_(number), before_(::signal(number, SIG_DFL)) {}
  ~DefaultAction() { ::signal(number_, before_); }
  DefaultAction(const DefaultAction&) = delete;
  DefaultAction& operator=(const DefaultAction&) = delete;

 private:
  int number_;
  void (*before_)(int);
};

TEST(Stopping, ASignalInterruptsTheWorkAndThenEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    const DefaultAction action(number);
    EXPECT_EXIT(end_in_order([&](const std::shared_ptr<const Interrupt>& interrupt) {
                  ::kill(::getpid(), number);
                  try {
                    wait_for(interrupt);
                  } catch (const Error& error) {
                    fprintf(stderr, "cleaned up");
                    throw;
                  }
                }),
                testing::KilledBySignal(number), "cleaned up");
  }
}

TEST(Stopping, ASecondSignalEndsTheProcessAtOnce) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const DefaultAction action(SIGINT);
  EXPECT_EXIT(end_in_order([](const std::shared_ptr<const Interrupt>& interrupt) {
                ::kill(::getpid(), SIGINT);
                EXPECT_THROW(wait_for(interrupt), Error);
                fprintf(stderr, "still here");
                ::kill(::getpid(), SIGINT);
                ::pause();
              }),
              testing::KilledBySignal(SIGINT), "still here");
}

TEST(Stopping, WithoutASignalWorkAndItsErrorsAreAsWithoutIt) {
  const DefaultAction action(SIGINT);
  int calls = 0;
  end_in_order([&](const std::shared_ptr<const Interrupt>& interrupt) {
    EXPECT_FALSE(interrupt->requested());
    ++calls;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_THROW(end_in_order([](const auto&) { throw std::runtime_error("of the work"); }),
               std::runtime_error);
  sigset_t blocked;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  EXPECT_EQ(::sigismember(&blocked, SIGINT), 0);
}

TEST(Stopping, AnIgnoredSignalStaysIgnored) {
  const auto before = ::signal(SIGHUP, SIG_IGN);
  end_in_order([](const std::shared_ptr<const Interrupt>& interrupt) {
    ::kill(::getpid(), SIGHUP);
    std::this_thread::sleep_for(milliseconds(20));
    EXPECT_FALSE(interrupt->requested());
  });
  ::signal(SIGHUP, before);
}

}  // namespace tilestone::cli::stopping_test
