// delta, as a user runs it, and what applies it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tilestone/cli/cli_testing.h"
#include "tilestone/cli/run.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli::delta_test {

namespace fs = std::filesystem;
using testing::HasSubstr;

class Delta : public FolderTest {
 protected:
  // "w" [64, 100] bfloat16 of two ranks, "same", and "scalar"; with `more`, a key of its own.
  void save_version(const std::string& name, uint16_t changed, bool more = false) const {
    run_ranks(2, [&](Communicator comm) {
      std::vector<uint16_t> rows(3200, 0x3f80);
      for (size_t i = 7; i < rows.size(); i += 100) rows[i] += changed;
      rows[0] = 0x7fc0;  // NaN
      std::vector<float> same{1, -0.0F, 2};
      std::vector<int64_t> scalar{changed};
      StateDict state;
      state["w"] = ShardedTensor::from_rank_offsets(
          "w", TensorView::contiguous(rows.data(), DType::kBFloat16, {32, 100}),
          {{0, comm.rank(), comm.size()}});
      state["same"] = TensorView::of(same, {3});
      state["scalar"] = TensorView::of(scalar, {});
      if (more) state["more"] = TensorView::of(same, {1, 3});
      if (!more) state["less"] = TensorView::of(same, {3});
      save(state, at(name), {.comm = comm});
    });
  }
};

TEST_F(Delta, LeadsFromOneVersionToTheOtherAndFromNoOther) {
  save_version("a", 0);
  save_version("b", 3, true);
  const Ran ran = tilestone_command({"delta", at("a"), at("b"), at("d.safetensors"), "--json"});
  ASSERT_EQ(ran.code, kOk) << ran.err;
  const auto report = nlohmann::json::parse(ran.out);
  EXPECT_EQ(report["changed"], 2);
  EXPECT_EQ(report["unchanged"], 1);
  EXPECT_EQ(report["added"], 1);
  EXPECT_EQ(report["removed"], 1);
  EXPECT_EQ(report["bytes"], fs::file_size(at("d.safetensors")));

  const DeltaReport applied = apply_delta(at("a"), at("d.safetensors"), at("made"));
  EXPECT_EQ(applied.result, report["result"].get<std::string>());
  EXPECT_EQ(tilestone_command({"diff", at("made"), at("b")}).code, kOk);
  try {
    apply_delta(at("b"), at("d.safetensors"), at("again"));
    FAIL() << "the new version was taken for the base";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
  }
  EXPECT_FALSE(fs::exists(at("again")));
}

TEST_F(Delta, AppliesToAFolderOfSafetensors) {
  save_version("a", 0);
  save_version("b", 3);
  ASSERT_EQ(tilestone_command({"convert", at("a"), at("hf")}).code, kOk);
  const Ran ran = tilestone_command({"delta", at("hf"), at("b"), at("d.safetensors")});
  ASSERT_EQ(ran.code, kOk) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("2 tensors changed, 2 unchanged, 0 added, 0 removed"));
  apply_delta(at("hf"), at("d.safetensors"), at("made"));
  EXPECT_TRUE(fs::exists(at("made/model.safetensors")));
  EXPECT_EQ(tilestone_command({"diff", at("made"), at("b")}).code, kOk);
}

// A byte of the file is damaged; whatever it says then, the result is right or an error.
TEST_F(Delta, ADamagedFileMakesTheNewVersionOrNothing) {
  save_version("a", 0);
  save_version("b", 3);
  make_delta(at("a"), at("b"), at("d.safetensors"));
  std::ifstream in(at("d.safetensors"), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  for (size_t i = 0; i < whole.size(); i += 1 + whole.size() / 100) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    std::ofstream(at("damaged.safetensors"), std::ios::binary) << damaged;
    try {
      apply_delta(at("a"), at("damaged.safetensors"), at("made"));  // a space of the header
      EXPECT_EQ(tilestone_command({"diff", at("made"), at("b")}).code, kOk) << i;
    } catch (const Error&) {
      EXPECT_FALSE(fs::exists(at("made")));
    }
    fs::remove_all(at("made"));
  }
}

TEST_F(Delta, AFileThatIsNoDeltaAndAnotherNameAreRefused) {
  save_version("a", 0);
  ASSERT_EQ(tilestone_command({"convert", at("a"), at("x.safetensors")}).code, kOk);
  EXPECT_THROW(apply_delta(at("a"), at("x.safetensors"), at("made")), Error);
  EXPECT_THROW(apply_delta(at("a"), at("nothing"), at("made")), Error);
  const Ran ran = tilestone_command({"delta", at("a"), at("a"), at("d")});
  EXPECT_EQ(ran.code, kUsage);
  EXPECT_THAT(ran.err, HasSubstr(".safetensors"));
  EXPECT_EQ(tilestone_command({"delta", at("a"), at("a"), at("x.safetensors")}).code, kIoFailed);
}

}  // namespace tilestone::cli::delta_test
