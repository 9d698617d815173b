#include "tilestone/engine/training_run/checkpoint_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::checkpoint_manager_test {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

ManagerOptions options_of(const Communicator& comm, std::optional<Keep> keep = std::nullopt) {
  ManagerOptions options;
  options.comm = comm;
  options.keep = std::move(keep);
  options.saving.timeout = 60;
  options.saving.resources.threads = 1;
  options.saving.resources.buffer_bytes = 1u << 20;
  return options;
}

std::vector<uint64_t> steps_of(const CheckpointManager& manager) {
  std::vector<uint64_t> steps;
  for (const StepInfo& info : manager.steps()) steps.push_back(info.step);
  return steps;
}

void damage(const fs::path& folder) {
  for (const auto& file : fs::directory_iterator(folder)) {
    if (file.path().extension() != ".distcp") continue;
    fs::resize_file(file.path(), 64);
    break;
  }
}

TEST(CheckpointManager, SavesWhenDueKeepsWhatIsWantedAndRestoresTheNewest) {
  const TempDirectory run;
  run_ranks(2, [&](const Communicator& comm) {
    ManagerOptions options = options_of(comm, Keep{.last = 2, .every = 20});
    options.every = 5;
    {
      CheckpointManager manager(run.path(), options);
      const auto fresh = manager.restore(row_template(comm));
      EXPECT_EQ(fresh.step, std::nullopt);
      for (uint64_t step = 1; step <= 32; ++step) {
        const auto first = static_cast<int64_t>(step);
        EXPECT_EQ(manager.save(step, row_state(comm, first)), step % 5 == 0);
      }
      manager.wait();
      if (comm.rank() == 0) {
        EXPECT_THAT(steps_of(manager), ElementsAre(20, 25, 30));
      }
    }
    CheckpointManager manager(run.path(), options);
    const auto restored = manager.restore(row_template(comm));
    EXPECT_EQ(restored.step, 30u);
    EXPECT_EQ(restored.state.get<int>("step"), 30);
  });
}

TEST(CheckpointManager, ForcesASaveAndNeverWritesAStateTwice) {
  const TempDirectory run;
  ManagerOptions options = options_of(solo());
  options.every = 10;
  CheckpointManager manager(run.path(), options);
  EXPECT_FALSE(manager.save(3, row_state(solo(), 3)));
  EXPECT_TRUE(manager.save(3, row_state(solo(), 3), {}, true));
  EXPECT_TRUE(manager.save(3, row_state(solo(), 3), {{"loss", 0.5}}, true));
  EXPECT_EQ(manager.steps().front().metrics.at("loss"), 0.5);
  expect_error([&] { manager.save(3, row_state(solo(), 4), {}, true); }, ErrorCode::kAlreadyExists,
               "differs");
  EXPECT_TRUE(manager.should_save(10));
  EXPECT_TRUE(manager.save(10, row_state(solo(), 10)));
  EXPECT_FALSE(manager.should_save(10));
  EXPECT_THAT(steps_of(manager), ElementsAre(3, 10));
  CheckpointManager other(run.path(), options);
  expect_error([&] { other.save(10, row_state(solo(), 10)); }, ErrorCode::kAlreadyExists);
  options.saving.overwrite = true;
  EXPECT_TRUE(CheckpointManager(run.path(), options).save(10, row_state(solo(), 11)));
}

TEST(CheckpointManager, RanksCompareAStepThatIsSavedOnceMoreInEveryFormatAndDialect) {
  for (const auto& format : known_formats()) {
    for (const auto& dialect : known_dialects()) {
      SCOPED_TRACE(std::string(format->name()) + " " + std::string(dialect->name()));
      const TempDirectory run;
      run_ranks(2, [&](const Communicator& comm) {
        ManagerOptions options = options_of(comm);
        options.saving.format = format;
        options.saving.dialect = dialect;
        CheckpointManager manager(run.path(), options);
        EXPECT_TRUE(manager.save(1, row_state(comm, 5)));
        EXPECT_TRUE(manager.save(1, row_state(comm, 5), {{"loss", 1.0 + comm.rank()}}));
        expect_error([&] { manager.save(1, row_state(comm, 5 + comm.rank())); },
                     ErrorCode::kAlreadyExists, "step 1 is saved already");
        EXPECT_TRUE(manager.save(1, row_state(comm, 5)));
        EXPECT_EQ(manager.steps().front().metrics.at("loss"), 1.0);
      });
      EXPECT_TRUE(Checkpoint::open(run.path() + "/step-00000001").verify().ok());
    }
  }
}

TEST(CheckpointManager, MetricsAreRank0sAndDecideWhatIsBest) {
  const TempDirectory run;
  const double losses[] = {0.5, 0.1, 0.4, 0.9};
  run_ranks(2, [&](const Communicator& comm) {
    CheckpointManager manager(
        run.path(), options_of(comm, Keep{.last = 1, .best = Best{"loss", Best::Mode::kMin, 2}}));
    for (uint64_t step = 1; step <= 4; ++step) {
      const double loss = comm.rank() == 0 ? losses[step - 1] : -1.0 * double(step);
      manager.save(step, row_state(comm, 1), {{"loss", loss}});
    }
    manager.wait();
    if (comm.rank() != 0) return;
    EXPECT_THAT(steps_of(manager), ElementsAre(2, 3, 4));
    EXPECT_EQ(manager.best(), 2u);
    EXPECT_EQ(manager.latest(), 4u);
    EXPECT_EQ(manager.steps().front().metrics.at("loss"), 0.1);
  });
}

TEST(CheckpointManager, ASaveThatLostSomethingSaysSo) {
  const TempDirectory run;
  const auto whole = [] {
    StateDict state = row_state(solo(), 1);
    state["moments"] = counting(DType::kFloat32, {4});
    return state;
  };
  {
    CheckpointManager first(run.path(), options_of(solo()));
    const LoggedWarnings warnings;
    first.save(1, whole());
    first.save(2, whole());
    EXPECT_THAT(warnings.texts(), IsEmpty());
    first.save(3, row_state(solo(), 1));
    EXPECT_THAT(warnings.texts(),
                ElementsAre(HasSubstr("step 3 lacks something that step 2 has: the key moments")));
    first.save(4, row_state(solo(), 1));
    EXPECT_EQ(warnings.texts().size(), 1u);
  }
  ManagerOptions options = options_of(solo());
  options.strict = true;
  fs::remove_all(fs::path(run.path()) / "step-00000004");
  fs::remove_all(fs::path(run.path()) / "step-00000003");
  CheckpointManager strict(run.path(), options);  // compares with what a run before it has saved
  expect_error([&] { strict.save(5, row_state(solo(), 1)); }, ErrorCode::kMismatch, "moments");
  EXPECT_EQ(strict.latest(), 2u);
  EXPECT_TRUE(strict.save(5, whole()));
}

TEST(CheckpointManager, ASaveIsComparedWithTheLastDurableStepAndNotWithAFailedOne) {
  const TempDirectory run;
  ManagerOptions options = options_of(solo());
  options.strict = true;
  CheckpointManager manager(run.path(), options);
  manager.save(1, row_state(solo(), 1));
  StateDict other;
  other["other"] = 1;
  expect_error([&] { manager.save(2, other); }, ErrorCode::kMismatch, "step 1 has");
  EXPECT_TRUE(manager.save(3, row_state(solo(), 1)));
}

TEST(CheckpointManager, WhatTheCommonStateHasLostIsSaidToo) {
  const TempDirectory run;
  const auto state = [](bool whole) {
    StateDict made;
    made["iteration"] = 7;
    made["rng"] = Value::dict({{"cpu", 1}, {"states", Value::list({1, 2})}});
    if (whole) made["scheduler"] = Value::dict({{"lr", 0.5}});
    if (whole) made["groups"] = Value::list({Value::dict({{"lr", 0.5}})});
    return made;
  };
  ManagerOptions options = options_of(solo());
  options.saving.dialect = dialect_named("megatron");
  options.strict = true;
  for (uint64_t step = 1; step <= 3; step += 2) {  // the second manager reads what the first saved
    CheckpointManager manager(run.path(), options);
    EXPECT_TRUE(manager.save(step, state(true)));
    expect_error([&] { manager.save(step + 1, state(false)); }, ErrorCode::kMismatch,
                 "2 keys are missing: common_state.groups.0.lr, common_state.scheduler.lr");
  }
  CheckpointManager manager(run.path(), options);
  expect_error([&] { manager.save(4, state(false)); }, ErrorCode::kMismatch, "common_state");
}

TEST(CheckpointManager, AStepThatIsDurableUnderAnotherNameIsSavedAgainOnlyWithOverwrite) {
  const TempDirectory run;
  run_ranks(2, [&](const Communicator& comm) {
    ManagerOptions options = options_of(comm);
    options.name = "step-{step}";
    CheckpointManager(run.path(), options).save(20, row_state(comm, 20));
  });
  const auto failed = failures(2, [&](const Communicator& comm) {
    CheckpointManager(run.path(), options_of(comm)).save(20, row_state(comm, 21));
  });
  for (const std::string& text : failed) {
    EXPECT_THAT(text, HasSubstr("step 20 is durable already, in the folder step-20"));
  }
  ManagerOptions options = options_of(solo());
  options.saving.overwrite = true;
  CheckpointManager manager(run.path(), options);
  EXPECT_TRUE(manager.save(20, row_state(solo(), 21)));
  EXPECT_EQ(manager.restore(row_template(solo())).state.get<int>("step"), 21);
}

TEST(CheckpointManager, ADirectoryThatSeemsFreshButHoldsCheckpointsIsWarnedOf) {
  const TempDirectory run;
  ManagerOptions options = options_of(solo());
  options.name = "ckpt_{step}";
  CheckpointManager(run.path(), options).save(20, row_state(solo(), 20));
  const LoggedWarnings warnings;
  EXPECT_EQ(CheckpointManager(run.path(), options).restore(row_template(solo())).step, 20u);
  EXPECT_THAT(warnings.texts(), IsEmpty());
  EXPECT_EQ(CheckpointManager(run.path(), options_of(solo())).restore(row_template(solo())).step,
            std::nullopt);
  const std::string step = std::string(run.path()) + "/ckpt_20";
  EXPECT_EQ(CheckpointManager(step, options).restore(row_template(solo())).step, std::nullopt);
  EXPECT_THAT(warnings.texts(),
              ElementsAre(HasSubstr("has no folder of a step, but 1 checkpoint like ckpt_20"),
                          HasSubstr("is a checkpoint itself")));
}

void expect_restored(const TempDirectory& run, uint64_t step, int value) {
  StateDict wanted;  // of any number of ranks
  wanted["step"] = 0;
  const auto restored = CheckpointManager(run.path(), options_of(solo())).restore(wanted);
  EXPECT_EQ(restored.step, step);
  EXPECT_EQ(restored.state.get<int>("step"), value);
}

TEST(CheckpointManager, AnotherRunsHigherStepStaysAndIsSaidOnceAndNotRestored) {
  const TempDirectory run;
  CheckpointManager(run.path(), options_of(solo())).save(1000, row_state(solo(), 1000));
  const LoggedWarnings warnings;
  {
    CheckpointManager manager(run.path(), options_of(solo(), Keep{.last = 2}));
    for (const int64_t step : {10, 20, 30, 40}) manager.save(step, row_state(solo(), step));
    manager.wait();
    EXPECT_THAT(steps_of(manager), ElementsAre(30, 40, 1000));
    EXPECT_EQ(manager.latest(), 40u);
  }
  EXPECT_THAT(warnings.texts(),
              ElementsAre(testing::AllOf(HasSubstr("step 10 in "), HasSubstr("1000, which is of "
                                                                             "another run"))));
  expect_restored(run, 40, 40);
  CheckpointManager manager(run.path(), options_of(solo()));
  EXPECT_EQ(manager.restore(row_template(solo()), {.step = 1000}).step, 1000u);
  manager.save(1010, row_state(solo(), 1010));
  expect_restored(run, 1010, 1010);
}

TEST(CheckpointManager, AStepOfABranchThatTheRunHasLeftIsReplaced) {
  const TempDirectory run;
  run_ranks(2, [&](const Communicator& comm) {
    CheckpointManager manager(run.path(), options_of(comm));
    for (const int64_t step : {10, 20, 30, 40}) manager.save(step, row_state(comm, step));
  });
  const LoggedWarnings warnings;
  run_ranks(2, [&](const Communicator& comm) {
    CheckpointManager manager(run.path(), options_of(comm));
    manager.restore(row_template(comm), {.step = 20});
    EXPECT_TRUE(manager.save(30, row_state(comm, -30)));
  });
  EXPECT_THAT(warnings.texts(),
              ElementsAre(HasSubstr("step-00000030 in "), HasSubstr("40, which is of a branch")));
  expect_restored(run, 30, -30);
  const auto failed = failures(2, [&](const Communicator& comm) {  // of another run
    CheckpointManager(run.path(), options_of(comm)).save(30, row_state(comm, 1));
  });
  for (const std::string& text : failed) EXPECT_THAT(text, HasSubstr("overwrite"));
  expect_restored(run, 30, -30);
}

TEST(CheckpointManager, AFallbackGoesToTheStepThatTheDamagedOneContinues) {
  const TempDirectory run;
  {
    CheckpointManager manager(run.path(), options_of(solo()));
    for (const int64_t step : {10, 20, 30}) manager.save(step, row_state(solo(), step));
    manager.restore(row_template(solo()), {.step = 10});
    manager.save(15, row_state(solo(), 15));
  }
  damage(fs::path(run.path()) / "step-00000015");
  CheckpointManager manager(run.path(), options_of(solo()));
  expect_error([&] { manager.restore(row_template(solo())); }, ErrorCode::kCorrupt, "fallback");
  EXPECT_EQ(manager.restore(row_template(solo()), {.fallback = true}).step, 10u);
  manager.save(15, row_state(solo(), 16));
  expect_restored(run, 15, 16);
}

TEST(CheckpointManager, ARunThatContinuesAnOlderStepHasItAsItsParent) {
  const TempDirectory run;
  SaveOptions plain;
  plain.comm = solo();
  for (const int64_t step : {10, 20}) {
    tilestone::save(row_state(solo(), step),
                    Location(fs::path(run.path()) / ("step-" + std::to_string(step))), plain);
  }
  CheckpointManager manager(run.path(), options_of(solo(), Keep{.last = 2}));
  EXPECT_EQ(manager.restore(row_template(solo())).step, 20u);
  manager.save(30, row_state(solo(), 30));
  manager.wait();
  EXPECT_THAT(steps_of(manager), ElementsAre(20, 30));
  const Lineage lineage = manager.steps().back().lineage;
  EXPECT_EQ(lineage.parent->step, 20u);
  EXPECT_EQ(lineage.after, 20u);
  EXPECT_EQ(lineage.ordinal, 1u);
}

TEST(CheckpointManager, RanksThatSeeDifferentStepsAreNamed) {
  const TempDirectory run;
  const TempDirectory other;  // as if nothing were mounted on rank 0's host
  CheckpointManager(run.path(), options_of(solo())).save(10, row_state(solo(), 10));
  CheckpointManager(run.path(), options_of(solo())).save(20, row_state(solo(), 20));
  const auto failed = failures(3, [&](const Communicator& comm) {
    CheckpointManager(comm.rank() == 0 ? other.path() : run.path(), options_of(comm));
  });
  for (const std::string& text : failed) {
    EXPECT_THAT(text, HasSubstr("the ranks see different steps"));
    EXPECT_THAT(text, HasSubstr("ranks 1 and 2: 2 steps, the last one step-00000020"));
    EXPECT_THAT(text, HasSubstr("; rank 0: no step"));
  }
}

TEST(CheckpointManager, RanksThatRestoreDifferentStepsAreNamed) {
  const TempDirectory run;
  for (const uint64_t step : {10, 20}) {
    CheckpointManager(run.path(), options_of(solo())).save(step, row_state(solo(), 10));
  }
  const auto failed = failures(2, [&](const Communicator& comm) {
    RestoreOptions options;
    if (comm.rank() == 1) options.step = 10;
    CheckpointManager(run.path(), options_of(comm)).restore(row_template(comm), options);
  });
  for (const std::string& text : failed) {
    EXPECT_THAT(text, HasSubstr("don't agree on step (rank 0: the newest; rank 1: 10)"));
  }
}

TEST(CheckpointManager, ADamagedStepIsLeftBehindOnlyIfAskedAndSavedAgain) {
  const TempDirectory run;
  run_ranks(2, [&](const Communicator& comm) {
    CheckpointManager manager(run.path(), options_of(comm));
    manager.save(10, row_state(comm, 10));
    manager.save(20, row_state(comm, 20));
  });
  damage(fs::path(run.path()) / "step-00000020");
  const auto failed = failures(2, [&](const Communicator& comm) {
    CheckpointManager(run.path(), options_of(comm)).restore(row_template(comm));
  });
  for (const std::string& text : failed) {
    EXPECT_THAT(text, HasSubstr("step-00000020 is damaged: "));
    EXPECT_THAT(text, HasSubstr("restore with fallback"));
  }
  run_ranks(2, [&](const Communicator& comm) {
    CheckpointManager manager(run.path(), options_of(comm));
    const auto restored = manager.restore(row_template(comm), {.fallback = true});
    EXPECT_EQ(restored.step, 10u);
    EXPECT_EQ(restored.state.get<int>("step"), 10);
    manager.save(20, row_state(comm, 21));
  });
  CheckpointManager manager(run.path(), options_of(solo()));
  EXPECT_EQ(manager.latest(), 20u);
}

// One flipped byte shows only when it is read.
TEST(CheckpointManager, DamageThatShowsWhileLoadingFallsBackToo) {
  const TempDirectory run;
  {
    CheckpointManager manager(run.path(), options_of(solo()));
    for (const int64_t step : {10, 20}) manager.save(step, row_state(solo(), step));
  }
  for (const auto& file : fs::directory_iterator(fs::path(run.path()) / "step-00000020")) {
    if (file.path().extension() != ".distcp") continue;
    const Bytes bytes(fs::file_size(file.path()), std::byte{7});
    put_file(*posix_storage(file.path().parent_path()), "replaced", bytes);
    fs::rename(file.path().parent_path() / "replaced", file.path());
  }
  CheckpointManager manager(run.path(), options_of(solo()));
  expect_error([&] { manager.restore(row_template(solo())); }, ErrorCode::kCorrupt);
  const LoggedWarnings warnings;
  const auto restored = manager.restore(row_template(solo()), {.fallback = true});
  EXPECT_EQ(restored.step, 10u);
  EXPECT_THAT(warnings.texts(), testing::Contains(HasSubstr("10 steps is lost")));
}

TEST(CheckpointManager, AStepWithAnEmptyManifestIsDamagedAndNotOneOfAnOlderRun) {
  const TempDirectory run;
  {
    CheckpointManager manager(run.path(), options_of(solo()));
    for (const int64_t step : {10, 20}) manager.save(step, row_state(solo(), step));
  }
  for (const auto& file :
       fs::directory_iterator(fs::path(run.path()) / "step-00000020" / ".tilestone")) {
    if (file.path().extension() == ".manifest") fs::resize_file(file.path(), 0);
  }
  CheckpointManager manager(run.path(), options_of(solo()));
  EXPECT_EQ(manager.steps().back().state, StepState::kDamaged);
  expect_error([&] { manager.restore(row_template(solo())); }, ErrorCode::kCorrupt,
               "the manifest is empty");
  EXPECT_EQ(manager.restore(row_template(solo()), {.fallback = true}).step, 10u);
}

// Nothing says which run it is of. It counts as one of the older run, but is not passed over
// silently.
TEST(CheckpointManager, ADamagedStepThatHasLostItsManifestIsNamedAndNotCounted) {
  const TempDirectory run;
  {
    CheckpointManager manager(run.path(), options_of(solo()));
    for (const int64_t step : {10, 20, 30}) manager.save(step, row_state(solo(), step));
  }
  const fs::path last = fs::path(run.path()) / "step-00000030";
  fs::remove_all(last / ".tilestone");
  fs::resize_file(last / ".metadata", fs::file_size(last / ".metadata") / 2);
  CheckpointManager manager(run.path(), options_of(solo(), Keep{.last = 2}));
  const LoggedWarnings warnings;
  EXPECT_EQ(manager.restore(row_template(solo())).step, 20u);
  EXPECT_THAT(warnings.texts(),
              testing::Contains(AllOf(HasSubstr("step-00000030"), HasSubstr("it is damaged"))));
  manager.save(40, row_state(solo(), 40));
  manager.wait();
  EXPECT_THAT(steps_of(manager), ElementsAre(20, 30, 40));
}

TEST(CheckpointManager, ARestoreOfAGivenStepNamesWhatItFinds) {
  const TempDirectory run;
  CheckpointManager manager(run.path(), options_of(solo()));
  manager.save(10, row_state(solo(), 10));
  manager.save(20, row_state(solo(), 20));
  EXPECT_EQ(manager.restore(row_template(solo()), {.step = 10}).state.get<int>("step"), 10);
  expect_error([&] { manager.restore(row_template(solo()), {.step = 15}); }, ErrorCode::kNotFound,
               "10 20");
}

TEST(CheckpointManager, OptionsOutOfRangeAreRefused) {
  ManagerOptions options = options_of(solo());
  options.every = 0;
  expect_error([&] { CheckpointManager("run", options); }, ErrorCode::kInvalidArgument, "every");
  options = options_of(solo(), Keep{.last = 0});
  expect_error([&] { CheckpointManager("run", options); }, ErrorCode::kInvalidArgument, "last");
  options = options_of(solo());
  options.name = "latest";
  expect_error([&] { CheckpointManager("run", options); }, ErrorCode::kInvalidArgument, "latest");
}

}  // namespace tilestone::checkpoint_manager_test
