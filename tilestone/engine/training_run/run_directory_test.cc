#include "tilestone/engine/training_run/checkpoint_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/base/uuid.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/commit/whole_removal_internal.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::run_directory_test {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

// A run's directory in the file system.
class Run : public testing::Test {
 protected:
  fs::path path() const { return directory_.path(); }
  fs::path folder(const std::string& name) const { return path() / name; }
  RunDirectory run(const std::string& pattern = kStepPattern) const {
    return RunDirectory(Location(path()), pattern);
  }
  void save_as(const std::string& name, SaveOptions options = {}) const {
    options.comm = solo();
    save(row_state(solo(), 7), Location(folder(name)), options);
  }
  void save_step(uint64_t step, const std::map<std::string, double>& metrics = {}) const {
    SaveOptions options;
    options.attributes = attributes_of(metrics);
    save_as(StepNames().name_of(step), options);
  }
  // As a killed save leaves it: data files and a note, and no index.
  void leave_unfinished(uint64_t step) const {
    save_step(step);
    const fs::path place = folder(StepNames().name_of(step));
    fs::remove(place / ".metadata");
    for (const auto& file : fs::directory_iterator(place / ".tilestone")) {
      if (file.path().extension() != ".manifest") continue;
      std::ofstream(file.path().parent_path() / (file.path().stem().string() + ".begun"));
      fs::remove(file.path());
    }
  }
  // A checkpoint of Megatron-Core in a format that Tilestone does not read.
  void leave_foreign(const std::string& name) const {
    fs::create_directories(folder(name));
    std::ofstream(folder(name) / "metadata.json")
        << R"({"sharded_backend": "fsdp_dtensor_2", "sharded_backend_version": 1})";
  }
  void cut_data_of(const std::string& name) const {
    for (const auto& file : fs::directory_iterator(folder(name))) {
      if (file.path().extension() == ".distcp") fs::resize_file(file.path(), 20);
    }
  }
  StepState state_of(const std::string& name) const {
    for (const StepInfo& step : run().steps()) {
      if (step.name == name) return step.state;
    }
    ADD_FAILURE() << name << " is not listed";
    return StepState::kForeign;
  }
  std::vector<std::string> folders() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path()))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  TempDirectory directory_;
};

TEST(NamesOfSteps, FollowThePatternAndThoseOfOtherPrograms) {
  const StepNames names("ckpt_{step:04}.dcp");
  EXPECT_EQ(names.name_of(12), "ckpt_0012.dcp");
  EXPECT_EQ(names.name_of(123456), "ckpt_123456.dcp");
  for (const char* name : {"ckpt_0012.dcp", "step-00000012", "iter_0000012", "step-12"}) {
    EXPECT_EQ(names.step_of(name), 12u) << name;
  }
  for (const char* name :
       {"ckpt_12.dcp", "ckpt_00012.dcp", "ckpt_.dcp", "ckpt_-012.dcp", "iter_12", "iter_00000012",
        "step-012", "step-", "step-12 ", ".step-12", "step-99999999999999999999", "release"}) {
    EXPECT_EQ(names.step_of(name), std::nullopt) << name;
  }
  EXPECT_EQ(StepNames("{step}").step_of("12"), 12u);
  for (const char* pattern : {"", "step", "step-{step", "{step:8}", "{step:0x}", "{step}{step}",
                              "a/{step}", ".{step}", "a{b}{step}", "{step:021}", "v2{step}"}) {
    expect_error([&] { StepNames bad(pattern); }, ErrorCode::kInvalidArgument, "pattern");
  }
}

TEST(Metrics, ComeBackFromAttributesAsTheyWere) {
  const std::map<std::string, double> metrics = {{"loss", 0.1}, {"a.b", -1e300}, {"n", 3}};
  std::map<std::string, std::string> attributes = attributes_of(metrics);
  attributes["metric.text"] = "one";
  attributes["loss"] = "7";
  EXPECT_EQ(metrics_of(attributes), metrics);
  expect_error([] { attributes_of({{"", 1}}); }, ErrorCode::kInvalidArgument, "metric");
}

TEST_F(Run, IsEmptyWithoutADirectoryAndWithOtherFiles) {
  EXPECT_THAT(RunDirectory(Location(path() / "none")).steps(), IsEmpty());
  EXPECT_EQ(RunDirectory(Location(path() / "none")).newest(), std::nullopt);
  std::ofstream(path() / "step-7") << "a file";
  fs::create_directory(path() / "logs");
  EXPECT_THAT(run().steps(), IsEmpty());
  EXPECT_FALSE(is_run_directory(run()));
}

TEST_F(Run, ListsStepsWithTheirStates) {
  save_step(1, {{"loss", 0.5}});
  leave_unfinished(2);
  save_step(3);
  cut_data_of("step-00000003");
  save_step(4);
  std::ofstream(folder("step-00000004") / ".metadata") << "no pickle";
  leave_foreign("step-00000005");
  fs::create_directories(folder("step-00000006"));
  const std::vector<StepInfo> steps = run().steps();
  ASSERT_THAT(steps, SizeIs(6));
  const StepState expected[] = {StepState::kDurable, StepState::kUnfinished,
                                StepState::kDamaged, StepState::kDamaged,
                                StepState::kForeign, StepState::kUnfinished};
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(steps[i].step, i + 1);
    EXPECT_EQ(steps[i].state, expected[i]) << i << steps[i].problem;
    EXPECT_EQ(steps[i].problem.empty(), i == 0) << steps[i].problem;
  }
  EXPECT_EQ(steps[0].format, "torch_dist");
  EXPECT_THAT(steps[0].writer, HasSubstr("Tilestone"));
  EXPECT_EQ(steps[0].metrics, (std::map<std::string, double>{{"loss", 0.5}}));
  EXPECT_GT(steps[0].bytes, 100u);
  ASSERT_TRUE(steps[0].time);
  EXPECT_THAT(steps[2].problem, HasSubstr("too short"));
  EXPECT_TRUE(is_run_directory(run()));
  EXPECT_FALSE(is_run_directory(RunDirectory(Location(folder("step-00000001")))));
}

TEST_F(Run, AStepThatIsBeingSavedIsUnfinished) {
  const Location place(folder("step-00000001"));
  const auto lock = engine::claim_location(place.storage());
  const std::vector<StepInfo> steps = run().steps();
  ASSERT_THAT(steps, SizeIs(1));
  EXPECT_EQ(steps[0].state, StepState::kUnfinished);
  EXPECT_TRUE(steps[0].is_saved_to);
  EXPECT_EQ(run().remove("step-00000001"), Removed::kNot);
}

TEST_F(Run, AStepOfStockMegatronWithoutItsLastFileIsUnfinished) {
  SaveOptions options;
  options.dialect = megatron_dialect();
  save_as("iter_0000100", options);
  EXPECT_EQ(state_of("iter_0000100"), StepState::kDurable);
  std::ofstream(path() / "latest_checkpointed_iteration.txt") << "200";
  save_as("iter_0000200", options);
  fs::resize_file(folder("iter_0000200") / "metadata.json", 0);  // it is not written in one step
  EXPECT_EQ(state_of("iter_0000200"), StepState::kUnfinished);
  EXPECT_EQ(run().newest()->step, 100u);  // whatever the tracker says
  fs::remove(folder("iter_0000200") / "metadata.json");
  EXPECT_EQ(state_of("iter_0000200"), StepState::kUnfinished);
}

TEST_F(Run, NewestIsTheNewestDurableStepOfAnyName) {
  save_as("step-90");
  save_as("iter_0000080");
  save_step(70);
  leave_unfinished(100);
  const LoggedWarnings warnings;
  EXPECT_EQ(run().newest()->name, "step-90");
  EXPECT_THAT(warnings.texts(),
              ElementsAre(AllOf(HasSubstr("step-00000100"), HasSubstr("unfinished"))));
  EXPECT_EQ(run().name_of(80), "iter_0000080");
  EXPECT_EQ(run().name_of(81), "step-00000081");
  EXPECT_EQ(run().newest(false, {"step-90"})->name, "iter_0000080");
}

TEST_F(Run, ADamagedNewestStepIsAnErrorUnlessTheCallerFallsBack) {
  save_step(10);
  save_step(20);
  save_step(30);
  cut_data_of("step-00000020");
  cut_data_of("step-00000030");
  expect_error([&] { run().newest(); }, ErrorCode::kCorrupt, "fallback");
  const LoggedWarnings warnings;
  EXPECT_EQ(run().newest(true)->step, 10u);
  EXPECT_THAT(warnings.texts(),
              ElementsAre(AllOf(HasSubstr("step-00000030 is damaged"),
                                HasSubstr("20 steps is lost"), HasSubstr("step-00000010"))));
  cut_data_of("step-00000010");
  expect_error([&] { run().newest(true); }, ErrorCode::kCorrupt, "no older checkpoint");
}

TEST_F(Run, LinkedStepsAreReadAndNeverRemoved) {
  save_as("elsewhere/step-00000001");
  TempDirectory outside;
  fs::rename(folder("elsewhere"), fs::path(outside.path()) / "elsewhere");
  fs::create_directory_symlink(fs::path(outside.path()) / "elsewhere/step-00000001",
                               folder("step-00000001"));
  fs::create_directory_symlink(folder("nothing"), folder("step-00000009"));  // dangling
  EXPECT_EQ(run().newest()->step, 1u);
  EXPECT_TRUE(run().newest()->is_link);
  const LoggedWarnings warnings;
  EXPECT_EQ(run().remove("step-00000001"), Removed::kNot);
  EXPECT_THAT(warnings.texts(), ElementsAre(HasSubstr("link")));
  EXPECT_EQ(run().newest()->step, 1u);
}

TEST_F(Run, RemovingAStepLeavesNothing) {
  save_step(1);
  save_step(2);
  SaveOptions zarr;
  zarr.format = zarr_format();
  save_as("step-3", zarr);
  EXPECT_EQ(run().remove("step-00000001"), Removed::kNow);
  EXPECT_EQ(run().remove("step-00000001"), Removed::kByOther);
  EXPECT_EQ(run().remove("step-3"), Removed::kNow);
  EXPECT_THAT(folders(), ElementsAre("step-00000002"));
}

bool begin_removal(const Location& step) {
  const auto claim = engine::claim_location(step.storage());
  return engine::begin_removal(step.storage(), claim.get()) != nullptr;
}

// A removal that was killed once its mark stood: there is no such step any more.
TEST_F(Run, AStepWhoseRemovalHasBegunIsNoStepAndItsFilesAreRemovedByTheNextPruning) {
  for (const char* kind : {"torch_dist", "zarr", "megatron"}) {
    save_step(10);
    SaveOptions options;
    if (kind == std::string("zarr")) options.format = zarr_format();
    if (kind == std::string("megatron")) options.dialect = megatron_dialect();
    save_as("step-00000020", options);
    const Location gone(folder("step-00000020"));
    EXPECT_TRUE(begin_removal(gone));
    EXPECT_FALSE(begin_removal(gone));
    EXPECT_EQ(state_of("step-00000020"), StepState::kUnfinished) << kind;
    EXPECT_THAT(run().find(20)->problem, HasSubstr("it was removed"));
    expect_error([&] { Checkpoint::open(gone); }, ErrorCode::kNotFound, "gc");
    const LoggedWarnings warnings;
    EXPECT_EQ(run().newest()->step, 10u);
    EXPECT_EQ(run().find_leftovers().size(), gone.storage().list().size() - 1)
        << "all but the lock";
    save_step(30);
    std::map<std::string, StepInfo> known;
    EXPECT_THAT(run().prune(30, {}, known), ElementsAre(10));
    EXPECT_THAT(folders(), ElementsAre("step-00000030"));
    EXPECT_EQ(run().remove("step-00000030"), Removed::kNow);
  }
}

TEST_F(Run, ASaveEndsARemovalThatWasKilledAndGcDoesToo) {
  SaveOptions megatron;
  megatron.dialect = megatron_dialect();
  save_as("step-20", megatron);
  std::ofstream(folder("step-20") / "notes.txt") << "a user's file";
  EXPECT_TRUE(begin_removal(Location(folder("step-20"))));
  save_as("step-20", megatron);
  EXPECT_EQ(state_of("step-20"), StepState::kDurable);
  EXPECT_FALSE(fs::exists(folder("step-20") / "notes.txt"));
  EXPECT_TRUE(begin_removal(Location(folder("step-20"))));
  EXPECT_THAT(run().remove_leftovers(), testing::Not(IsEmpty()));
  EXPECT_THAT(folders(), IsEmpty());
}

TEST_F(Run, AMarkThatIsPutLateOverAStepThatWasSavedAnewIsVoid) {
  save_step(10);
  const Location step = Location(folder("step-00000010"));
  ASSERT_TRUE(begin_removal(step));
  const Bytes mark = read_file(step.storage(), std::string(engine::kRemovedName), 1 << 20);
  save_step(10);
  step.storage().put(std::string(engine::kRemovedName), mark, Condition::always(), "mark.tmp",
                     Deadline::never());
  EXPECT_EQ(run().find(10)->state, StepState::kUnfinished);
  const LoggedWarnings warnings;
  EXPECT_EQ(run().remove("step-00000010"), Removed::kNot);
  EXPECT_EQ(run().find(10)->state, StepState::kDurable);
}

TEST_F(Run, AStepThatWasSavedAnewSinceItWasLookedAtIsNotRemoved) {
  save_step(10);
  const StepInfo seen = *run().find(10);
  SaveOptions anew;
  anew.overwrite = true;
  save_as("step-00000010", anew);
  const LoggedWarnings warnings;
  EXPECT_EQ(run().remove(seen), Removed::kNot);
  EXPECT_THAT(warnings.texts(), ElementsAre(HasSubstr("saved anew")));
  EXPECT_EQ(run().remove(*run().find(10)), Removed::kNow);
}

// Two processes prune the same steps. Each step is removed once, and nothing else is made or left.
TEST_F(Run, RacingRemovalsRemoveEachStepOnce) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    save_step(1);
    std::atomic<int> removed = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] { removed += run().remove("step-00000001") == Removed::kNow; });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(removed, 1);
    run().remove_remains(2);
    EXPECT_THAT(folders(), IsEmpty());
    if (HasFailure()) return;
  }
}

TEST_F(Run, PruningKeepsWhatTheRulesKeep) {
  for (const uint64_t step : {10, 20, 30, 40, 50}) save_step(step, {{"loss", 1.0 / double(step)}});
  std::map<std::string, StepInfo> known;
  EXPECT_THAT(
      run().prune(50, {.last = 1, .every = 40, .best = Best{"loss", Best::Mode::kMax, 1}}, known),
      ElementsAre(20, 30));
  EXPECT_THAT(folders(), ElementsAre("step-00000010", "step-00000040", "step-00000050"));
  EXPECT_THAT(known, SizeIs(5));
}

TEST_F(Run, NothingIsPrunedUnlessTheNewerStepIsDurable) {
  save_step(10);
  save_step(20);
  save_step(30);
  cut_data_of("step-00000030");
  leave_unfinished(40);
  std::map<std::string, StepInfo> known;
  for (const uint64_t step : {30, 40, 50}) {
    const LoggedWarnings warnings;
    EXPECT_THAT(run().prune(step, {}, known), IsEmpty());
    EXPECT_THAT(warnings.texts(), ElementsAre(HasSubstr("is not durable")));
  }
  EXPECT_THAT(folders(), SizeIs(4));
}

TEST_F(Run, DamagedForeignAndLaterStepsAreNotPruned) {
  for (const uint64_t step : {10, 20, 30, 40}) save_step(step);
  cut_data_of("step-00000010");
  leave_foreign("step-00000015");
  std::map<std::string, StepInfo> known;
  EXPECT_THAT(run().prune(30, {}, known), ElementsAre(20));
  EXPECT_THAT(folders(),
              ElementsAre("step-00000010", "step-00000015", "step-00000030", "step-00000040"));
}

TEST_F(Run, PruningRemovesWhatKilledSavesAndKilledPruningsHaveLeft) {
  leave_unfinished(5);
  fs::create_directories(folder("step-00000006"));
  save_step(7);
  fs::rename(folder("step-00000007"), folder(engine::sibling_name("step-00000007", random_uuid())));
  leave_unfinished(8);
  std::ofstream(folder("step-00000008") / "notes.txt") << "a user's file";
  save_step(10);
  leave_unfinished(20);  // not below the saved step
  std::map<std::string, StepInfo> known;
  EXPECT_THAT(run().prune(10, {}, known), IsEmpty());
  EXPECT_THAT(folders(), ElementsAre("step-00000008", "step-00000010", "step-00000020"));
}

// The save was killed after its commit, before it removed what it replaces.
TEST_F(Run, PruningRemovesWhatAKilledSaveHasReplacedInAKeptStep) {
  save_step(5);
  const std::string id = random_uuid();
  const fs::path data = folder("step-00000005") / (id + "__0_0.distcp");
  const fs::path note = folder("step-00000005") / engine::note_name(id);
  std::ofstream(data) << "replaced";
  save_step(10);
  Keep keep;
  keep.last = 2;
  std::map<std::string, StepInfo> known;
  EXPECT_THAT(run().prune(10, keep, known), IsEmpty());
  EXPECT_TRUE(fs::exists(data)) << "without a note it may have been copied there";
  std::ofstream(note) << "";
  EXPECT_THAT(run().prune(10, keep, known), IsEmpty());
  EXPECT_TRUE(fs::exists(data)) << "the step is known";
  known.clear();
  EXPECT_THAT(run().prune(10, keep, known), IsEmpty());
  EXPECT_FALSE(fs::exists(data));
  EXPECT_FALSE(fs::exists(note));
  EXPECT_EQ(state_of("step-00000005"), StepState::kDurable);
}

TEST_F(Run, LeftoversOfItsStepsAreFoundAndRemoved) {
  leave_unfinished(5);
  save_step(7);
  const std::string hidden = engine::sibling_name("step-00000007", random_uuid());
  fs::rename(folder("step-00000007"), folder(hidden));
  save_step(10);
  std::vector<std::string> names;
  for (const Leftover& file : run().find_leftovers()) names.push_back(file.name);
  EXPECT_THAT(names, Contains(hidden));
  EXPECT_THAT(names, Contains(testing::AllOf(testing::StartsWith("step-00000005/"),
                                             testing::EndsWith(".distcp"))));
  EXPECT_EQ(run().remove_leftovers().size(), names.size());
  EXPECT_THAT(run().find_leftovers(), IsEmpty());
  EXPECT_EQ(run().newest()->step, 10u);
}

TEST_F(Run, AStepInUseIsNotPruned) {
  save_step(10);
  save_step(20);
  const auto lock = engine::claim_location(Location(folder("step-00000010")).storage());
  std::map<std::string, StepInfo> known;
  const LoggedWarnings warnings;
  EXPECT_THAT(run().prune(20, {}, known), IsEmpty());
  EXPECT_THAT(warnings.texts(), ElementsAre(HasSubstr("in use")));
  EXPECT_EQ(state_of("step-00000010"), StepState::kDurable);
}

TEST_F(Run, TheInventoryOfAStepNamesItsKeysAndWriters) {
  save_step(10);
  const Inventory held = inventory_of(Location(folder("step-00000010")));
  EXPECT_THAT(held.objects, ElementsAre("step"));
  ASSERT_TRUE(held.tensors.contains("w"));
  EXPECT_THAT(held.tensors.at("w").writers, ElementsAre(0));
  EXPECT_THAT(held.bytes, SizeIs(1));
}

}  // namespace tilestone::run_directory_test
