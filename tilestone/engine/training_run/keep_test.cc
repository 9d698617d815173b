#include "tilestone/engine/training_run/checkpoint_manager.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::keep_test {

using Steps = std::vector<uint64_t>;

std::vector<StepInfo> every_ten(uint64_t last) {
  std::vector<StepInfo> steps;
  for (uint64_t step = 10; step <= last; step += 10) steps.push_back({.step = step});
  return steps;
}

constexpr double kNow = 10000;

// The numbers of what is pruned once the step `saved` is durable.
Steps steps_to_prune(const std::vector<StepInfo>& durable, uint64_t saved, const Keep& keep) {
  Steps pruned;
  for (const StepInfo& each : durable) {
    if (each.step != saved) continue;
    for (const StepInfo* step : tilestone::steps_to_prune(durable, each, keep, kNow)) {
      pruned.push_back(step->step);
    }
    break;
  }
  return pruned;
}

TEST(Keep, TheNewestOnesStay) {
  EXPECT_EQ(steps_to_prune(every_ten(50), 50, {.last = 3}), (Steps{10, 20}));
  EXPECT_EQ(steps_to_prune(every_ten(50), 50, {}), (Steps{10, 20, 30, 40}));
  EXPECT_EQ(steps_to_prune(every_ten(20), 20, {.last = 5}), Steps{});
}

TEST(Keep, MultiplesStay) {
  EXPECT_EQ(steps_to_prune(every_ten(90), 90, {.last = 2, .every = 30}),
            (Steps{10, 20, 40, 50, 70}));
}

TEST(Keep, TheBestStayByTheirMetric) {
  std::vector<StepInfo> steps = every_ten(60);
  const double losses[] = {0.5, 0.1, NAN, 0.3, 0.1, 0.9};
  for (size_t i = 0; i < steps.size(); ++i) steps[i].metrics["loss"] = losses[i];
  steps.push_back({.step = 70});  // without the metric
  EXPECT_EQ(steps_to_prune(steps, 70, {.best = Best{"loss", Best::Mode::kMin, 2}}),
            (Steps{10, 30, 40, 60}));
  EXPECT_EQ(steps_to_prune(steps, 70, {.best = Best{"loss", Best::Mode::kMax, 1}}),
            (Steps{10, 20, 30, 40, 50}));
  Line line;
  for (const StepInfo& step : steps) line.push_back(&step);
  EXPECT_EQ(best_steps(line, {"loss", Best::Mode::kMin, 9}), (Steps{50, 20, 40, 10, 60}));
  EXPECT_EQ(best_steps(line, {"accuracy", Best::Mode::kMax, 2}), Steps{});
}

TEST(Keep, YoungStepsStayAndThoseOfUnknownAge) {
  std::vector<StepInfo> steps = every_ten(40);
  steps[0].time = kNow - 7200;
  steps[1].time = kNow - 3599;
  EXPECT_EQ(steps_to_prune(steps, 40, {.newer_than = 3600}), (Steps{10}));
}

// The run went back to step 20 and has saved step 30 again: 40 and 50 are not superseded.
TEST(Keep, NothingAboveTheSavedStepIsPrunedNorTheSavedStepItself) {
  EXPECT_EQ(steps_to_prune(every_ten(50), 30, {.last = 1}), (Steps{10, 20}));
  EXPECT_EQ(steps_to_prune(every_ten(50), 30, {.last = 2}), (Steps{10}));
}

TEST(Keep, ADuplicateOfAStepCountsOnce) {
  std::vector<StepInfo> steps = every_ten(30);
  steps.push_back({.step = 20});
  EXPECT_EQ(steps_to_prune(steps, 30, {.last = 2}), (Steps{10}));
}

TEST(Keep, RulesThatCantBeMeantAreRefused) {
  const auto refused = [](const Keep& keep, const std::string& field) {
    expect_error([&] { check_keep(keep); }, ErrorCode::kInvalidArgument, "keep." + field);
  };
  refused({.last = 0}, "last");
  refused({.best = Best{"", Best::Mode::kMin, 1}}, "best");
  refused({.best = Best{"loss", Best::Mode::kMin, 0}}, "best");
  refused({.newer_than = -1.0}, "newer_than");
  refused({.newer_than = NAN}, "newer_than");
  check_keep({.last = 3, .every = 5000, .best = Best{"loss"}, .newer_than = 0.0});
}

}  // namespace tilestone::keep_test
