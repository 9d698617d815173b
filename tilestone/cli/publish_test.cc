// `tilestone publish` and `gc --abandon`, on unpublished saves without a communicator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tilestone/cli/cli_testing.h"
#include "tilestone/cli/run.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli::publish_test {

using testing::HasSubstr;

class Unpublished : public testing::Test {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::path(testing::TempDir()) /
             testing::UnitTest::GetInstance()->current_test_info()->name())
                .string();
    std::filesystem::remove_all(path_);
  }
  void TearDown() override { std::filesystem::remove_all(path_); }

  // Saves row `rank` of two, without waiting for the other rank.
  void save_rank(int rank, bool rank_local = false) const {
    std::vector<float> row(4, static_cast<float>(rank));
    StateDict state;
    state["w"] = ShardedTensor::from_rank_offsets(
        "w", TensorView::contiguous(row.data(), DType::kFloat32, {1, 4}), {{0, rank, 2}});
    SaveOptions options;
    options.by_files = ByFiles{rank, 2, "a run of a test"};
    options.by_files->wait = false;
    options.by_files->torch_rank_local = rank_local;
    options.attributes = {{"iteration", "100"}};
    save(state, path_, options);
  }

  std::string path_;
};

TEST_F(Unpublished, PublishSaysWhichRanksAreMissingAndWhatIsUnpublished) {
  save_rank(0);
  const Ran refused = tilestone_command({"publish", path_});
  EXPECT_EQ(refused.code, kIoFailed);
  EXPECT_THAT(refused.err, HasSubstr("1 of its 2 ranks has not written (rank 1)"));
  const Ran listed = tilestone_command({"publish", path_, "--list", "--json"});
  EXPECT_EQ(listed.code, kOk);
  const auto saves = nlohmann::json::parse(listed.out);
  ASSERT_EQ(saves.size(), 1u);
  EXPECT_EQ(saves[0]["world_size"], 2);
  EXPECT_EQ(saves[0]["missing"], std::vector<int>{1});
}

// Both ranks write all of "p", with other values.
TEST_F(Unpublished, OfReplicasThatContradictEachOtherTheListSaysThatTheSaveHasFailed) {
  for (const int rank : {0, 1}) {
    StateDict state;
    std::vector<float> all(5, 0);
    state["p"] = ShardedTensor::from_rank_offsets(
        "p", TensorView::contiguous(all.data(), DType::kFloat32, {4 + rank}), {});
    SaveOptions options;
    options.by_files = ByFiles{rank, 2, "a run of a test"};
    options.by_files->wait = false;
    try {
      save(state, path_, options);
      EXPECT_EQ(rank, 0);
    } catch (const Error& error) {
      EXPECT_EQ(rank, 1) << error.what();
    }
  }
  const Ran listed = tilestone_command({"publish", path_, "--list"});
  EXPECT_EQ(listed.code, kOk);
  EXPECT_THAT(listed.out, HasSubstr("has failed: "));
  EXPECT_THAT(listed.out, HasSubstr("`tilestone gc --delete` removes its files"));
  const auto saves =
      nlohmann::json::parse(tilestone_command({"publish", path_, "--list", "--json"}).out);
  EXPECT_TRUE(saves[0]["abandoned"]);
  EXPECT_THAT(std::string(saves[0]["failure"]), HasSubstr("p"));
}

TEST_F(Unpublished, WhatMayStillBePublishedIsListedWithWhatCanBeDone) {
  save_rank(0);
  const Ran listed = tilestone_command({"publish", path_, "--list"});
  EXPECT_THAT(listed.out, HasSubstr("it may still be writing"));
  EXPECT_THAT(listed.out, testing::Not(HasSubstr("has failed")));
}

TEST_F(Unpublished, ARankLocalCheckpointIsShownWithItsAttributesAndReceipts) {
  for (const int rank : {0, 1}) save_rank(rank, true);
  const Ran shown = tilestone_command({"inspect", path_});
  EXPECT_EQ(shown.code, kOk);
  EXPECT_THAT(shown.out, HasSubstr("none (each rank wrote its own metadata)"));
  EXPECT_THAT(shown.out, HasSubstr("attribute  iteration = 100"));
  EXPECT_THAT(shown.out, HasSubstr("receipts of 2 ranks, checksums of whole items"));
  const auto whole = nlohmann::json::parse(tilestone_command({"inspect", path_, "--json"}).out);
  EXPECT_EQ(whole["manifest"], false);
  EXPECT_EQ(whole["attributes"]["iteration"], "100");
}

TEST_F(Unpublished, OnAnUnpublishedSaveEveryCommandSaysWhatIsMissing) {
  save_rank(0);
  const char* const text = "1 of its 2 ranks has not written (rank 1)";
  for (const char* command : {"ls", "inspect", "verify"}) {
    const Ran refused = tilestone_command({command, path_});
    EXPECT_EQ(refused.code, kIoFailed);
    EXPECT_THAT(refused.err, HasSubstr("no checkpoint at"));
    EXPECT_THAT(refused.err, HasSubstr(text));
  }
  const Ran listed = tilestone_command({"gc", path_});
  EXPECT_EQ(listed.code, kOk);
  EXPECT_THAT(listed.out, HasSubstr("no leftovers"));
  EXPECT_THAT(listed.out, HasSubstr("not a leftover: the save "));
  EXPECT_THAT(listed.out, HasSubstr(text));
  const auto json = nlohmann::json::parse(tilestone_command({"gc", path_, "--json"}).out);
  EXPECT_EQ(json["files"].size(), 0u);
  ASSERT_EQ(json["unpublished"].size(), 1u);
  EXPECT_THAT(std::string(json["unpublished"][0]["text"]), HasSubstr(text));
}

TEST_F(Unpublished, AfterTheLastRankNothingIsLeftToPublish) {
  save_rank(0);
  save_rank(1);
  EXPECT_EQ(tilestone_command({"verify", path_}).code, kOk);
  EXPECT_EQ(tilestone_command({"publish", path_}).code, kIoFailed);  // nothing is unpublished
  EXPECT_THAT(tilestone_command({"publish", path_, "--list"}).out,
              HasSubstr("no unpublished saves"));
  EXPECT_EQ(tilestone_command({"publish", path_ + "-misspelt", "--list"}).code, kIoFailed);
}

}  // namespace tilestone::cli::publish_test
