// What a run's listing says of its steps by their hints, in a file system and in an object store.
#include "tilestone/engine/training_run/hints_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error_testing.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::hints_test {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

constexpr const char* kFirst = "step-00000001";
constexpr const char* kSecond = "step-00000002";

using Metrics = std::map<std::string, double>;

// A run in a storage, and what asks it for more than a listing of the run's directory and hints.
class Hinted : public testing::TestWithParam<bool> {
 protected:
  bool is_store() const { return GetParam(); }
  RunDirectory run() const { return RunDirectory(Location(storage_)); }
  std::vector<std::string> files() const {
    return storage_->list_files(std::string(engine::kHints));
  }
  static StateDict state_of(uint64_t step) { return row_state(solo(), static_cast<int64_t>(step)); }
  static ManagerOptions options_with(std::optional<Keep> keep) {
    ManagerOptions options;
    options.keep = std::move(keep);
    options.saving.resources.threads = 1;
    options.saving.resources.buffer_bytes = 1u << 20;
    return options;
  }
  void save_steps(uint64_t first, uint64_t last, std::optional<Keep> keep = std::nullopt,
                  const std::shared_ptr<Storage>& at = nullptr) const {
    CheckpointManager manager(Location(at ? at : storage_), options_with(std::move(keep)));
    manager.restore(row_template(solo()));
    for (uint64_t step = first; step <= last; ++step) {
      manager.save(step, state_of(step), Metrics{{"val/loss", 1.0 / double(step)}});
      manager.wait();
    }
  }
  std::vector<uint64_t> durable() const {
    std::vector<uint64_t> steps;
    for (const StepInfo& each : run().steps()) {
      if (each.state == StepState::kDurable) steps.push_back(each.step);
    }
    return steps;
  }
  std::vector<std::string> folders() const {
    std::vector<std::string> names;
    for (const StepInfo& each : run().list()) names.push_back(each.name);
    return names;
  }
  void damage_third() const {
    for (const std::string& name : storage_->list("step-00000003/")) {
      if (name.ends_with(".distcp")) put(name);
    }
  }
  // As another program would: no hint says so.
  void remove_files_of(const std::string& folder) const {
    for (const std::string& name : storage_->list(folder + "/")) storage_->remove(name);
    storage_->tidy(folder);
  }
  std::string hint_of(const std::string& folder) const {
    const auto found = engine::hints_of(*storage_, folder);
    EXPECT_THAT(found, SizeIs(1));
    return found.empty() ? "" : found.front();
  }
  void put(const std::string& name) const {
    storage_->put(name, {}, Condition::always(), "scratch", Deadline::never());
  }

  const std::shared_ptr<Storage> storage_ = is_store() ? memory_objects() : memory_storage();
};

INSTANTIATE_TEST_SUITE_P(All, Hinted, testing::Bool(),
                         [](const auto& each) { return each.param ? "store" : "directory"; });

void expect_same(const StepInfo& a, const StepInfo& b) {
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.state, b.state);
  EXPECT_EQ(a.format + a.dialect + a.writer, b.format + b.dialect + b.writer);
  EXPECT_EQ(a.bytes, b.bytes);
  EXPECT_EQ(a.metrics, b.metrics);
  EXPECT_EQ(a.save_id, b.save_id);
  EXPECT_EQ(a.lineage, b.lineage);
}

TEST_P(Hinted, SayWhatALookAtEachStepSaysAndNoStepIsOpened) {
  save_steps(1, 4);
  EXPECT_THAT(files(), SizeIs(4));
  std::vector<std::string> opened, listed;
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
    if (call.op == StorageOp::kOpen) opened.emplace_back(call.name);
    if (call.op == StorageOp::kList) listed.emplace_back(call.name);
    return FaultAction::pass();
  });
  const RunDirectory watched(Location(disk->storage()));
  const auto steps = watched.steps();
  EXPECT_EQ(watched.latest(), 4u);
  EXPECT_EQ(watched.best({"val/loss", Best::Mode::kMin, 1}), 4u);
  EXPECT_EQ(steps_of_run(watched)->size(), 4u);
  EXPECT_THAT(opened, IsEmpty());
  if (is_store()) {
    EXPECT_THAT(listed, SizeIs(8)) << "two for each of the four";
  }
  ASSERT_THAT(steps, SizeIs(4));
  for (const StepInfo& each : steps) {
    EXPECT_FALSE(each.hint.empty());
    expect_same(each, run().look(each));
  }
}

TEST_P(Hinted, HaveAnyNamesAndAsManyMetricsAsThereAre) {
  Metrics metrics = {
      {"a,b=c/ä%", -1e300}, {"inf", std::numeric_limits<double>::infinity()}, {"third", 1.0 / 3}};
  for (const int more : {0, 100}) {
    for (int i = 0; i < more; ++i) metrics["metric of a long name " + std::to_string(i)] = i;
    ManagerOptions options = options_with(std::nullopt);
    options.name = "a,b%2C {step}";
    CheckpointManager manager((Location(storage_)), options);
    manager.save(more, state_of(1), metrics);
    manager.wait();
    const RunDirectory named(Location(storage_), options.name);
    EXPECT_EQ(named.steps().back().metrics, metrics);
    EXPECT_FALSE(named.steps().back().hint.empty());
  }
  put(engine::hints_of(*storage_, "a,b%2C 100").front());  // it was torn
  const RunDirectory named(Location(storage_), "a,b%2C {step}");
  EXPECT_EQ(named.steps().back().metrics, metrics);
}

TEST_P(Hinted, AStepWithoutOneIsLookedAtByItself) {
  save_steps(1, 4);
  storage_->remove(hint_of(kSecond));
  storage_->remove(hint_of("step-00000004"));
  EXPECT_THAT(durable(), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(run().latest(), 4u);
  save_steps(5, 5, Keep{.last = 2});
  EXPECT_THAT(durable(), ElementsAre(4, 5));
  EXPECT_EQ(run().steps().front().metrics, (Metrics{{"val/loss", 0.25}}));
}

TEST_P(Hinted, OneWhoseStepIsGoneIsPassedOverAndRemovedByTheNextPruning) {
  save_steps(1, 3);
  remove_files_of("step-00000003");
  EXPECT_THAT(files(), SizeIs(3));
  EXPECT_EQ(run().latest(), 2u);
  save_steps(4, 4, Keep{.last = 5});
  EXPECT_THAT(files(), SizeIs(3));
  EXPECT_THAT(durable(), ElementsAre(1, 2, 4));
}

TEST_P(Hinted, GoesBeforeTheRemovalOfItsStepBegins) {
  save_steps(1, 2);
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
    const bool is_mark = call.name.find("removed") != std::string::npos &&
                         (call.op == StorageOp::kCreate || call.op == StorageOp::kPut);
    return is_mark ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  const LoggedWarnings warnings;
  EXPECT_EQ(RunDirectory(Location(disk->storage())).remove(kFirst), Removed::kNot);
  EXPECT_THAT(engine::hints_of(*storage_, kFirst), IsEmpty());
  EXPECT_THAT(durable(), ElementsAre(1, 2));
  EXPECT_EQ(run().remove(kFirst), Removed::kNow);
  EXPECT_EQ(run().remove(run().steps().back()), Removed::kNow);
  EXPECT_THAT(files(), IsEmpty());
}

// Its number and its folder are the same: hints were copied from another run, or a program has
// saved over the step.
TEST_P(Hinted, OneOfAnotherCheckpointIsNotReliedOn) {
  save_steps(1, 3);
  const std::string wrong = hint_of(kSecond);
  SaveOptions anew;
  anew.overwrite = true;
  save(state_of(7), run().at(kSecond), anew);
  if (!is_store()) {
    EXPECT_EQ(run().steps()[1].lineage, Lineage());
  }
  const LoggedWarnings warnings;
  save_steps(4, 5, Keep{.last = 1});
  EXPECT_THAT(durable(), ElementsAre(2, 5)) << "it is of no run";
  expect_rows(run().at(kSecond), 7, 1);
  put(wrong);
  remove_files_of("step-00000005");
  EXPECT_EQ(run().newest()->name, kSecond);
  EXPECT_EQ(run().newest()->lineage, Lineage());
}

TEST_P(Hinted, TwoOfOneFolderCountAsNone) {
  save_steps(1, 2);
  std::string other = hint_of(kSecond);
  other.replace(other.find("0.5"), 3, "0.1");
  put(other);
  EXPECT_EQ(run().steps().back().metrics, (Metrics{{"val/loss", 0.5}}));
  EXPECT_EQ(run().steps().back().hint, "");
  run().note(2);
  EXPECT_EQ(run().steps().back().hint, hint_of(kSecond));
}

TEST_P(Hinted, OtherFilesBesideThemAreLeftAlone) {
  save_steps(1, 1);
  for (const char* name : {"a note", "step-00000009,0,run,,,,,,,,,", ",,,,,,,,,,,,", "%"}) {
    put(std::string(engine::kHints) + name);
  }
  EXPECT_THAT(durable(), ElementsAre(1));
  save_steps(2, 2, Keep{.last = 1});
  EXPECT_THAT(durable(), ElementsAre(2));
  EXPECT_THAT(files(), SizeIs(5));
}

// A step that stays in place of others is looked at first.
TEST_P(Hinted, NoStepIsRemovedBecauseOfADamagedOneWithAHint) {
  save_steps(1, 3);
  const LoggedWarnings warnings;
  CheckpointManager manager((Location(storage_)), options_with(Keep{.last = 2}));
  manager.restore(row_template(solo()));
  damage_third();
  manager.save(4, state_of(4));
  manager.wait();
  EXPECT_THAT(folders(), ElementsAre(kSecond, "step-00000003", "step-00000004"));
}

// Also by the manager that has saved it.
TEST_P(Hinted, NoStepIsRemovedBecauseOfOneThatWasDamagedSinceItWasSaved) {
  const LoggedWarnings warnings;
  CheckpointManager manager((Location(storage_)), options_with(Keep{.last = 2}));
  for (const uint64_t step : {1, 2, 3, 4}) {
    if (step == 4) damage_third();
    manager.save(step, state_of(step));
    manager.wait();
  }
  EXPECT_THAT(folders(), ElementsAre(kSecond, "step-00000003", "step-00000004"));
}

TEST_P(Hinted, MetricsThatComeLaterReplaceThem) {
  CheckpointManager manager((Location(storage_)), options_with(Keep{.last = 2}));
  manager.save(1, state_of(1), {{"loss", 2}});
  manager.wait();
  manager.save(1, state_of(1), {{"loss", 1}}, true);
  manager.wait();
  EXPECT_THAT(files(), SizeIs(1));
  EXPECT_EQ(manager.steps().front().metrics, (Metrics{{"loss", 1}}));
}

TEST_P(Hinted, ASaveDoesNotNeedThem) {
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
    const bool is_hint = call.name.find(".tilestone/steps/") != std::string::npos &&
                         (call.op == StorageOp::kCreate || call.op == StorageOp::kPut);
    return is_hint ? FaultAction::fail(EROFS) : FaultAction::pass();
  });
  const LoggedWarnings warnings;
  save_steps(1, 3, Keep{.last = 2}, disk->storage());
  EXPECT_THAT(warnings.texts(), Each(testing::HasSubstr("hints")));
  EXPECT_THAT(files(), IsEmpty());
  EXPECT_THAT(durable(), ElementsAre(2, 3));
}

// Each step says its own ordinal.
TEST_P(Hinted, NoSaveAndNoRestoreNeedsToListThem) {
  save_steps(1, 2);
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
    const bool lists = call.op == StorageOp::kList && call.name.find(".tilestone/steps") == 0;
    return lists ? FaultAction::fail(EACCES) : FaultAction::pass();
  });
  const LoggedWarnings warnings;
  save_steps(3, 3, std::nullopt, disk->storage());
  EXPECT_THAT(warnings.texts(), Each(testing::HasSubstr("hint")));
  EXPECT_EQ(run().look(run().list().back()).lineage.ordinal, 3u);
}

// Its ordinal would be too low, so that a later restore took another line.
TEST_P(Hinted, AStepIsNotSavedWhereTheOthersCantBeListed) {
  save_steps(1, 2);
  bool fails = false;
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
    const bool lists = fails && call.op == StorageOp::kList && call.name.empty();
    return lists ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  CheckpointManager other(Location(disk->storage()), options_with(std::nullopt));
  fails = true;
  EXPECT_EQ(error_of([&] { other.save(3, state_of(3)); }).code(), ErrorCode::kIo);
  EXPECT_THAT(folders(), ElementsAre(kFirst, kSecond));
}

// The process dies between the step's switch and its hint, or in the middle of that.
TEST_P(Hinted, ADeathBeforeItLeavesAStepThatTheRunContinues) {
  for (const uint64_t calls : {0, 1, 2}) {
    const uint64_t step = 1 + 2 * calls;
    uint64_t seen = 0;
    const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
      const bool is_hint = call.name.find(".tilestone/steps/") != std::string::npos &&
                           call.op != StorageOp::kList && call.op != StorageOp::kStat;
      return is_hint && seen++ == calls ? FaultAction::die() : FaultAction::pass();
    });
    const LoggedWarnings warnings;
    save_steps(step, step, std::nullopt, disk->storage());
    EXPECT_EQ(run().newest()->step, step);
    save_steps(step + 1, step + 1, Keep{.last = 1});
    EXPECT_THAT(durable(), ElementsAre(step + 1));
  }
}

}  // namespace tilestone::hints_test
