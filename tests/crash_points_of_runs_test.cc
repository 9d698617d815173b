// A run whose manager saves a step, prunes older ones and looks for the newest, while the machine
// crashes at every storage call, or each call goes wrong in each way. What is left is always a run
// that continues from the newest durable step: the one before, or once the save has ended the new
// one. The next save cleans up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::crash_points_of_runs_test {

using testing::Contains;
using testing::ElementsAre;
using testing::EndsWith;

constexpr uint64_t kStride = TILESTONE_CRASH_STRIDE;

ManagerOptions options_of_run() {
  ManagerOptions options;
  options.every = 10;
  options.keep = Keep{.last = 2};
  options.saving.resources.threads = 1;
  options.saving.resources.buffer_bytes = 1u << 20;
  return options;
}

StateDict state_at(uint64_t step) { return row_state(solo(), static_cast<int64_t>(step)); }

// Steps 10 and 20, a hidden folder of a step 5 that was being removed, and a step 15 whose save was
// killed.
FileImage run_before() {
  const auto storage = memory_storage();
  {
    CheckpointManager manager((Location(storage)), options_of_run());
    for (const uint64_t step : {10, 20}) manager.save(step, state_at(step));
    manager.wait();
  }
  FileImage image = memory_image(*storage);
  FileImage made = image;
  const std::string hidden =
      engine::sibling_name("step-00000005", "01234567-89ab-4def-8123-456789abcdef");
  for (const auto& [name, bytes] : made) {
    const std::string of_ten = "step-00000010/";
    if (!name.starts_with(of_ten)) continue;
    const std::string file = name.substr(of_ten.size());
    image[hidden + "/" + file] = bytes;
    if (file == ".metadata") continue;
    const bool is_manifest = file.ends_with(".manifest");
    const std::string left = is_manifest ? file.substr(0, file.size() - 9) + ".begun" : file;
    image["step-00000015/" + left] = is_manifest ? Bytes() : bytes;
  }
  return image;
}

void expect_content(const RunDirectory& run, const StepInfo& step) {
  const Checkpoint checkpoint = Checkpoint::open(run.at(step.name));
  EXPECT_TRUE(checkpoint.verify().ok());
  expect_rows(run.at(step.name), static_cast<int64_t>(step.step), 1);
}

std::vector<uint64_t> steps_in(const RunDirectory& run) {
  std::vector<uint64_t> steps;
  for (const StepInfo& step : run.list()) steps.push_back(step.step);
  return steps;
}

// `saved`: whether the save of step 30 had returned. Returns the newest step.
uint64_t judge(const FileImage& image, bool saved, bool goes_on) {
  const auto storage = memory_storage(image);
  const RunDirectory run((Location(storage)));
  const auto newest = run.newest();
  if (!newest) {
    ADD_FAILURE() << "no durable step is left";
    return 0;
  }
  EXPECT_TRUE(newest->step == 30 || (newest->step == 20 && !saved)) << newest->step;
  for (const StepInfo& step : run.steps()) {
    EXPECT_NE(step.state, StepState::kDamaged) << step.name << ": " << step.problem;
    if (step.state == StepState::kDurable) expect_content(run, step);
  }
  EXPECT_THAT(steps_in(run), Contains(20));
  if (!goes_on || testing::Test::HasFailure()) return newest->step;
  CheckpointManager manager((Location(storage)), options_of_run());
  const auto restored = manager.restore(row_template(solo()));
  EXPECT_EQ(restored.step, newest->step);
  manager.save(40, state_at(40));
  manager.wait();
  EXPECT_THAT(steps_in(run), ElementsAre(newest->step, 40));
  // A save removes its note last, and does not wait until that is durable.
  for (const Leftover& file : run.find_leftovers()) EXPECT_THAT(file.name, EndsWith(".begun"));
  EXPECT_THAT(storage->list_directories("."), ElementsAre(".tilestone"));
  return newest->step;
}

// `saved`: whether the save of step 30 has returned.
std::shared_ptr<FaultDisk> save_on(const FileImage& image, const FaultHook& hook, bool& saved,
                                   bool fails) {
  auto disk = FaultDisk::create(memory_storage(image), hook);
  saved = false;
  try {
    CheckpointManager manager(Location(disk->storage()), options_of_run());
    manager.restore(row_template(solo()));
    manager.save(30, state_at(30));
    saved = true;
    manager.wait();
    EXPECT_EQ(manager.latest(), 30u);
  } catch (const Error& error) {
    EXPECT_TRUE(fails || disk->crashed()) << error.what();
  }
  return disk;
}

TEST(CrashesOfRuns, LeaveTheNewestDurableStepAndLeftoversThatTheNextSaveRemoves) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  const FileImage image = run_before();
  for (const bool fails : {false, true}) {
    uint64_t with_new = 0;
    bool saved = false;
    const auto work = [&](const FaultHook& hook) { return save_on(image, hook, saved, fails); };
    const auto check = [&](const FileImage& left, uint64_t number) {
      with_new += judge(left, saved, number % 4 == 0) == 30;
    };
    const uint64_t points =
        fails ? fail_everywhere(work, check, 3) : crash_everywhere(work, check, kStride);
    std::printf("[          ] save, prune and newest: %lu %s, %lu with the new step\n",
                static_cast<unsigned long>(points), fails ? "calls went wrong" : "crash points",
                static_cast<unsigned long>(with_new));
    EXPECT_GT(with_new, 0);
    EXPECT_LT(with_new, points);
  }
  set_log_level(level);
}

}  // namespace tilestone::crash_points_of_runs_test
