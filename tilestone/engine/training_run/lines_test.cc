// Histories of runs, as lists of steps: which line is followed, what is kept, what is in the way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::lines_test {

using testing::ElementsAre;
using testing::IsEmpty;
using Steps = std::vector<uint64_t>;

// Saves steps as managers do that restore and save in turn.
class History : public testing::Test {
 protected:
  // A manager that has restored nothing.
  void begin(const std::string& run) { now_ = {.run = run}; }
  void restore(uint64_t step) {
    const StepInfo& found = at(step);
    now_ = found.lineage;
    now_.parent = StepId{step, found.save_id};
  }
  // A manager that has restored a step without a run id.
  void restore_older(uint64_t step, const std::string& run) {
    now_ = {.run = run, .parent = StepId{step}, .after = step};
  }
  void save(const Steps& steps) {
    for (const uint64_t step : steps) {
      const StepInfo made = next(step);
      std::erase_if(steps_, [&](const StepInfo& each) { return each.step == step; });
      steps_.push_back(made);
      now_.parent = StepId{step, made.save_id};
    }
  }
  void older(const Steps& steps) {
    for (const uint64_t step : steps) steps_.push_back({.step = step});
  }
  void remove(uint64_t step) {
    std::erase_if(steps_, [&](const StepInfo& each) { return each.step == step; });
  }
  // What a save of the step would be.
  StepInfo next(uint64_t step) {
    StepInfo made{.step = step, .save_id = "save" + std::to_string(++saves_), .lineage = now_};
    made.lineage.ordinal = tip_of(steps_) ? tip_of(steps_)->lineage.ordinal + 1 : 1;
    return made;
  }
  StepInfo& at(uint64_t step) {
    return *std::find_if(steps_.begin(), steps_.end(),
                         [&](const StepInfo& each) { return each.step == step; });
  }

  Steps followed() const { return numbers(line_of(steps_, *tip_of(steps_))); }
  Steps pruned(const Keep& keep) {
    Steps found = numbers(steps_to_prune(steps_, *tip_of(steps_), keep, 0));
    for (const uint64_t step : found) remove(step);
    return found;
  }
  bool is_in_the_way(uint64_t step) {  // and is replaced
    const StepInfo made = next(step);
    return is_abandoned(at(step), line_of(steps_, made));
  }
  Steps beside(uint64_t step) {
    const StepInfo made = next(step);
    return numbers(steps_beside(steps_, line_of(steps_, made)));
  }
  static Steps numbers(const std::vector<const StepInfo*>& steps) {
    Steps found;
    for (const StepInfo* each : steps) found.push_back(each->step);
    return found;
  }

  std::vector<StepInfo> steps_;

 private:
  Lineage now_;
  int saves_ = 0;
};

TEST_F(History, ALineGoesOnFromWhatWasRestored) {
  begin("a");
  save({10, 20});
  restore(20);
  save({30});
  EXPECT_THAT(followed(), ElementsAre(30, 20, 10));
  EXPECT_THAT(pruned({.last = 2}), ElementsAre(10));
  EXPECT_THAT(followed(), ElementsAre(30, 20));
}

TEST_F(History, AnotherRunsStepsAreNeitherFollowedNorRemovedWhateverTheirNumber) {
  begin("a");
  save({5, 1000});
  begin("b");
  EXPECT_THAT(beside(10), ElementsAre(1000));
  save({10, 20, 30, 40});
  EXPECT_THAT(followed(), ElementsAre(40, 30, 20, 10));
  EXPECT_THAT(pruned({.last = 2}), ElementsAre(10, 20));
  EXPECT_THAT(followed(), ElementsAre(40, 30));
  EXPECT_FALSE(is_in_the_way(1000));
  restore(1000);  // by its number: then its line is the newest
  save({1010});
  EXPECT_THAT(followed(), ElementsAre(1010, 1000, 5));
  EXPECT_THAT(pruned({.last = 1}), ElementsAre(5, 1000));
  EXPECT_THAT(steps_, testing::SizeIs(3));
}

TEST_F(History, TheBestIsOneOfTheLine) {
  begin("a");
  save({1000});
  at(1000).metrics["loss"] = 0.1;
  begin("b");
  save({10, 20, 30});
  const double losses[] = {0.5, 0.3, 0.4};
  for (size_t i = 0; i < 3; ++i) at(10 * (i + 1)).metrics["loss"] = losses[i];
  const Best best{"loss"};
  EXPECT_THAT(best_steps(line_of(steps_, *tip_of(steps_)), best), ElementsAre(20));
  EXPECT_THAT(pruned({.last = 1, .best = best}), ElementsAre(10));
}

TEST_F(History, ARunThatWentBackHasABranchThatIsReplacedAndGoesOnceEnoughIsNewer) {
  begin("a");
  save({10, 20, 30, 40, 50});
  restore(20);
  EXPECT_TRUE(is_in_the_way(30));
  EXPECT_FALSE(is_in_the_way(20)) << "it is on the line";
  EXPECT_THAT(beside(30), ElementsAre(50, 40));
  save({30});
  EXPECT_THAT(followed(), ElementsAre(30, 20, 10));
  EXPECT_THAT(pruned({.last = 2}), ElementsAre(10)) << "only one step is newer than the branch";
  save({35});
  EXPECT_THAT(pruned({.last = 2}), testing::UnorderedElementsAre(20, 40, 50));
  EXPECT_THAT(followed(), ElementsAre(35, 30));
}

TEST_F(History, AnAbandonedStepIsNotKeptByARule) {
  begin("a");
  save({10, 20, 30, 40});
  restore(10);
  save({15});
  EXPECT_THAT(pruned({.last = 1, .every = 10, .best = Best{"loss"}, .newer_than = 1e9}),
              ElementsAre(20, 30, 40));
}

TEST_F(History, GoingBackTwiceLeavesTwoBranches) {
  begin("a");
  save({10, 20, 30});
  restore(10);
  save({11, 12});
  restore(11);
  save({13});
  EXPECT_THAT(followed(), ElementsAre(13, 11, 10));
  restore(30);  // and back to the first
  save({40});
  EXPECT_THAT(followed(), ElementsAre(40, 30, 20, 10));
  EXPECT_TRUE(is_in_the_way(13));
}

TEST_F(History, ALineIsFoundWhenParentsWereRemoved) {
  begin("a");
  save({10, 20, 30, 40, 50});
  restore(20);
  save({25, 35, 45});
  remove(20);
  EXPECT_THAT(followed(), ElementsAre(45, 35, 25, 10));
  remove(35);
  EXPECT_THAT(followed(), ElementsAre(45, 25, 10));
}

TEST_F(History, StepsWithoutARunAreOneLineThatIsOlderThanAny) {
  older({10, 1000, 20});
  EXPECT_THAT(followed(), ElementsAre(1000, 20, 10));
  EXPECT_THAT(numbers(steps_to_prune(steps_, steps_[2], {.last = 1}, 0)), ElementsAre(10))
      << "nothing above the saved step";
  begin("a");
  save({5});
  EXPECT_THAT(followed(), ElementsAre(5));
  EXPECT_THAT(pruned({.last = 1}), IsEmpty());
}

TEST_F(History, ARunThatContinuesAStepWithoutARunHasItAsItsParent) {
  older({10, 20, 30, 40});
  restore_older(30, "a");
  EXPECT_FALSE(is_in_the_way(40)) << "nobody knows that it is of the same run";
  save({35, 36});
  EXPECT_THAT(followed(), ElementsAre(36, 35, 30, 20, 10));
  remove(35);
  EXPECT_THAT(followed(), ElementsAre(36, 30, 20, 10));
  EXPECT_THAT(pruned({.last = 2}), ElementsAre(10, 20));
  EXPECT_THAT(beside(37), ElementsAre(40));
}

TEST_F(History, AStepOfTheLineThatIsSavedAgainIsNotAbandoned) {
  begin("a");
  save({10, 20});
  EXPECT_FALSE(is_in_the_way(20));
  save({20});
  EXPECT_THAT(followed(), ElementsAre(20, 10));
}

TEST_F(History, ParentsThatNameOneAnotherEndTheLine) {
  steps_ = {
      {.step = 1, .save_id = "x", .lineage = {.run = "a", .ordinal = 1, .parent = StepId{2, "y"}}},
      {.step = 2, .save_id = "y", .lineage = {.run = "a", .ordinal = 1, .parent = StepId{1, "x"}}}};
  EXPECT_THAT(followed(), ElementsAre(2));
}

TEST(Lineages, ComeBackFromAttributesAsTheyWere) {
  const Lineage whole{.run = "a1", .ordinal = 7, .parent = StepId{20, "id"}, .after = 3};
  EXPECT_EQ(lineage_of(to_attributes(whole)), whole);
  const Lineage first{.run = "a1", .ordinal = 1, .parent = StepId{20}};
  EXPECT_EQ(lineage_of(to_attributes(first)), first);
  for (const char* ordinal : {"0", "-1", "x", "", "99999999999999999999"}) {
    auto attributes = to_attributes(whole);
    attributes["line.ordinal"] = ordinal;
    EXPECT_EQ(lineage_of(attributes), Lineage()) << ordinal;
  }
  EXPECT_EQ(run_name(Lineage()), "older");
}

}  // namespace tilestone::lines_test
