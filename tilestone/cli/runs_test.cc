// ls, verify and gc of a run's directory and of several paths.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tilestone/cli/cli_testing.h"
#include "tilestone/cli/run.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli::runs_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

// Step 10 is durable, the save of step 20 was killed, and the data file of step 30 is cut.
class RunOnTheCommandLine : public FolderTest {
 protected:
  void SetUp() override {
    run_ = (folder_ / "run").string();
    std::vector<float> weights(12);
    StateDict state;
    state["w"] = TensorView::of(weights, {3, 4});
    state["n"] = 7;
    CheckpointManager manager(run_);
    for (const uint64_t step : {10, 20, 30}) manager.save(step, state, {{"loss", 0.5}});
    const fs::path killed = run_ + "/step-00000020";
    fs::remove(killed / ".metadata");
    for (const auto& file : fs::directory_iterator(killed / ".tilestone")) {
      if (file.path().extension() != ".manifest") continue;
      std::ofstream(file.path().parent_path() / (file.path().stem().string() + ".begun"));
      fs::remove(file.path());
      break;
    }
    for (const auto& file : fs::directory_iterator(run_ + "/step-00000030")) {
      if (file.path().extension() == ".distcp") fs::resize_file(file.path(), 20);
    }
  }
  std::string step(const std::string& number) const { return run_ + "/step-000000" + number; }

  std::string run_;
};

TEST_F(RunOnTheCommandLine, LsShowsTheStepsWithTheirStates) {
  const Ran ran = tilestone_command({"ls", run_});
  EXPECT_EQ(ran.code, kOk) << ran.err;
  for (const char* text : {"STEP", "AGE", "step-00000010", "durable", "torch_dist", "Tilestone",
                           "step-00000020 is unfinished", "step-00000030 is damaged"}) {
    EXPECT_THAT(ran.out, HasSubstr(text));
  }
  const Ran keys = tilestone_command({"ls", run_, "*.bias"});
  EXPECT_EQ(keys.code, kUsage);
  EXPECT_THAT(keys.err, HasSubstr("this is a run's directory"));
  const auto json = nlohmann::json::parse(tilestone_command({"ls", run_, "--json"}).out);
  ASSERT_EQ(json["steps"].size(), 3u);
  EXPECT_EQ(json["steps"][0]["step"], 10);
  EXPECT_EQ(json["steps"][0]["metrics"]["loss"], 0.5);
  EXPECT_EQ(json["steps"][1]["state"], "unfinished");
  EXPECT_GT(json["steps"][0]["time"], 1e9);
}

TEST_F(RunOnTheCommandLine, LsTakesSeveralPathsAndPatterns) {
  const Ran ran = tilestone_command({"ls", step("10"), run_, "w"});
  EXPECT_EQ(ran.code, kOk) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("float32"));
  EXPECT_THAT(ran.out, Not(HasSubstr("object ")));
  EXPECT_THAT(ran.out, HasSubstr("unfinished"));
  const Ran failed = tilestone_command({"ls", step("20"), step("10"), "--json"});
  EXPECT_EQ(failed.code, kIoFailed);
  EXPECT_THAT(failed.err, HasSubstr("step-00000020"));
  const auto json = nlohmann::json::parse(failed.out);
  ASSERT_EQ(json.size(), 1u);
  EXPECT_EQ(json[0]["path"], step("10"));
}

TEST_F(RunOnTheCommandLine, VerifyChecksEachStepAndEndsWithTheWorstCode) {
  const Ran ran = tilestone_command({"verify", run_});
  EXPECT_EQ(ran.code, kDamaged);
  EXPECT_THAT(ran.out, HasSubstr(step("10") + ": ok"));
  EXPECT_THAT(ran.out, HasSubstr("TRUNCATED"));
  EXPECT_THAT(ran.err, HasSubstr(step("20")));
  EXPECT_EQ(tilestone_command({"verify", step("10"), step("10")}).code, kOk);
  EXPECT_EQ(tilestone_command({"verify", step("10"), step("20")}).code, kIoFailed);
  const auto json =
      nlohmann::json::parse(tilestone_command({"verify", step("10"), step("30"), "--json"}).out);
  EXPECT_EQ(json[0]["ok"], true);
  EXPECT_EQ(json[1]["ok"], false);
  EXPECT_EQ(json[1]["path"], step("30"));
}

TEST_F(RunOnTheCommandLine, GcFindsAndRemovesTheLeftoversOfKilledSaves) {
  fs::rename(step("30"), run_ + "/.step-00000030.tilestone-01234567-89ab-4def-8123-456789abcdef");
  const Ran listed = tilestone_command({"gc", run_});
  EXPECT_EQ(listed.code, kOk) << listed.err;
  EXPECT_THAT(listed.out, HasSubstr("step-00000020/"));
  EXPECT_THAT(listed.out, HasSubstr(".step-00000030.tilestone-"));
  EXPECT_EQ(tilestone_command({"gc", run_, "--delete"}).code, kOk);
  EXPECT_THAT(tilestone_command({"gc", run_}).out, HasSubstr("no leftovers"));
  EXPECT_EQ(tilestone_command({"verify", step("10")}).code, kOk);
  EXPECT_EQ(tilestone_command({"gc", run_, "--abandon"}).code, kUsage);
}

TEST_F(RunOnTheCommandLine, LsShowsTheLinesAndGcRemovesOne) {
  std::vector<float> weights(12);
  StateDict state;
  state["w"] = TensorView::of(weights, {3, 4});
  CheckpointManager(run_).save(5, state);  // another run
  const auto steps = nlohmann::json::parse(tilestone_command({"ls", run_, "--json"}).out)["steps"];
  ASSERT_EQ(steps.size(), 4u);  // 5, 10, the killed 20 and the damaged 30
  const std::string followed = steps[0]["line"], other = steps[1]["line"];
  EXPECT_NE(followed, other);
  EXPECT_EQ(steps[3]["line"], other);
  EXPECT_EQ(steps[0]["followed"], true);
  EXPECT_EQ(steps[1]["followed"], false);
  EXPECT_EQ(steps[3]["parent"], 20);
  const Ran shown = tilestone_command({"ls", run_});
  for (const std::string& text : {followed, other, std::string("continues from step 5")}) {
    EXPECT_THAT(shown.out, HasSubstr(text));
  }
  const Ran refused = tilestone_command({"gc", run_, "--line", followed, "--delete"});
  EXPECT_EQ(refused.code, kUsage);
  EXPECT_THAT(refused.err, HasSubstr("continues from step 5"));
  EXPECT_THAT(tilestone_command({"gc", run_, "--line", "nothing"}).err, HasSubstr(other));
  EXPECT_EQ(tilestone_command({"gc", step("10"), "--line", other}).code, kUsage);
  const Ran listed = tilestone_command({"gc", run_, "--line", other});
  EXPECT_THAT(listed.out, HasSubstr("2 leftovers"));
  EXPECT_TRUE(fs::exists(step("30")));
  EXPECT_EQ(tilestone_command({"gc", run_, "--line", other, "--delete"}).code, kOk);
  EXPECT_FALSE(fs::exists(step("10")) || fs::exists(step("30")));
  EXPECT_TRUE(fs::exists(step("05")));
  EXPECT_EQ(tilestone_command({"gc", run_, "--line", followed, "--force", "--delete"}).code, kOk);
  EXPECT_FALSE(fs::exists(step("05")));
}

TEST_F(RunOnTheCommandLine, UnusualNamesOfStepsCanBeGiven) {
  fs::rename(step("10"), run_ + "/ckpt_10");
  fs::rename(step("20"), run_ + "/ckpt_20");
  fs::rename(step("30"), run_ + "/ckpt_30");
  EXPECT_EQ(tilestone_command({"ls", run_}).code, kIoFailed);
  EXPECT_THAT(tilestone_command({"ls", run_, "--name", "ckpt_{step}"}).out, HasSubstr("ckpt_10"));
}

}  // namespace tilestone::cli::runs_test
