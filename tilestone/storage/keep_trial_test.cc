#include "tilestone/storage/keep_trial_internal.h"

#include <gtest/gtest.h>

#include <vector>

namespace tilestone::keep_trial_test {

// Runs a trial whose windows take these times, keep and bypass alternately, until its verdict.
std::optional<bool> verdict(const std::vector<double>& seconds, size_t* windows = nullptr) {
  KeepTrial trial(2);
  for (size_t i = 0; i < seconds.size(); ++i) {
    if (trial.verdict()) break;
    EXPECT_EQ(trial.keeps(), i % 2 == 0);
    if (windows != nullptr) *windows = i + 1;
    trial.measured(trial.window(), trial.window(), seconds[i]);
  }
  return trial.verdict();
}

TEST(KeepTrial, BypassesWhereThatIsClearlyFasterInEachWindow) {
  EXPECT_EQ(verdict({1.4, 1, 1.3, 1.1, 1.4}), false);
  EXPECT_EQ(verdict({1.4, 1, 1.4, 1}), std::nullopt);
}

TEST(KeepTrial, KeepsWhereThatIsAsFastWhateverDisturbsAWindow) {
  size_t windows = 0;
  EXPECT_EQ(verdict({1, 1, 1, 1, 1}, &windows), true);
  EXPECT_EQ(windows, 2u);
  EXPECT_EQ(verdict({9, 1, 1, 1, 1}), true);  // something else read from the disk
  EXPECT_EQ(verdict({1.4, 1, 1.4, 9, 1.4}), true);
  EXPECT_EQ(verdict({1.4, 1, 1.4, 1, 1.1}), true);
}

TEST(KeepTrial, AWindowOfWhichMuchWasCachedDoesNotCount) {
  KeepTrial trial(2);
  trial.measured(trial.window() / 2, trial.window(), 1);
  EXPECT_TRUE(trial.keeps());
  trial.measured(trial.window(), trial.window(), 1);
  EXPECT_FALSE(trial.keeps());
}

TEST(KeepTrial, AWindowGrowsWithTheNumberOfWorkers) {
  EXPECT_EQ(KeepTrial(1).window(), 64u << 20);
  EXPECT_EQ(KeepTrial(16).window(), 256u << 20);
  EXPECT_EQ(KeepTrial(1).worth_trying(), 1u << 30);
}

}  // namespace tilestone::keep_trial_test
