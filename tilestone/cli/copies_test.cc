// What the subcommands print about copies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tilestone/cli/cli_testing.h"
#include "tilestone/cli/run.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli::copies_test {

using testing::HasSubstr;

TEST(CliCopies, LsInspectAndVerifySayWhatIsThereAndWhatIsIntactElsewhere) {
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / "cli_copies_checkpoint";
  std::filesystem::remove_all(path);
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<float> values = {1, 2, 3, 4};
    ShardedTensor norm = ShardedTensor::from_rank_offsets(
        "norm", TensorView::contiguous(values.data(), DType::kFloat32, {4}), {}, {rank});
    norm.holders = {0, 1};
    StateDict state;
    state["norm"] = norm;
    state["step"] = Value(12);
    SaveOptions options;
    options.by_files = ByFiles{rank, 2, "a run of a test"};
    options.by_files->wait = false;
    options.copies.emplace();
    options.copies->group = {0, 1};
    save(state, path.string(), options);
  }
  Ran outcome = tilestone_command({"ls", path.string()});
  EXPECT_THAT(outcome.out, HasSubstr("copies of shards and objects, in other files: 2, "));
  outcome = tilestone_command({"inspect", path.string(), "step"});
  EXPECT_THAT(outcome.out, HasSubstr("copy  "));
  outcome = tilestone_command({"inspect", path.string(), "--json"});
  const auto json = nlohmann::json::parse(outcome.out);
  const Metadata metadata = Checkpoint::open(path.string()).metadata();
  EXPECT_EQ(json["copies"], 2);
  EXPECT_EQ(json["copy_bytes"], 16 + metadata.find_object("step")->at.length);
  const ItemLocation& at = metadata.copies.at(0).at;
  const std::string& file = metadata.files[at.file];
  std::fstream(path / file, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(at.offset + at.length / 2))
      .put('\x55');
  outcome = tilestone_command({"verify", path.string(), "--json"});
  const auto damages = nlohmann::json::parse(outcome.out)["damages"];
  ASSERT_EQ(damages.size(), 1u);
  EXPECT_EQ(damages[0]["copy"], true);
  EXPECT_EQ(damages[0]["intact_in"], metadata.files[metadata.tensors[0].chunks[0].at.file]);
  outcome = tilestone_command({"verify", path.string()});
  EXPECT_THAT(outcome.out, HasSubstr("a copy of key norm"));
  EXPECT_THAT(outcome.out, HasSubstr("its elements are intact in"));
  outcome = tilestone_command({"verify", path.string(), "--repair"});
  EXPECT_EQ(outcome.code, kOk);
  EXPECT_THAT(outcome.out, HasSubstr("MENDED  " + file + "  key norm, from"));
  EXPECT_EQ(tilestone_command({"verify", path.string()}).code, kOk);

  std::filesystem::remove(path / file);
  outcome = tilestone_command({"verify", path.string()});
  EXPECT_THAT(outcome.out,
              HasSubstr("the file is missing; everything that it should hold is intact"));
  outcome = tilestone_command({"verify", path.string(), "--repair"});
  EXPECT_EQ(outcome.code, kOk);
  EXPECT_THAT(outcome.out, HasSubstr("MENDED  " + file + "  the file is missing"));
  std::filesystem::remove_all(path);
}

}  // namespace tilestone::cli::copies_test
