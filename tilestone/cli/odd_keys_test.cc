// Keys that are empty, long, wide or not printable, and patterns that match nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tilestone/cli/cli_testing.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/format/known/known.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli::odd_keys_test {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class OddKeys : public FolderTest {
 protected:
  // Each key has one float32 of this value.
  void save_to(const std::string& name, const std::vector<std::string>& keys,
               float value = 1) const {
    std::vector<float> memory{value};
    StateDict state;
    for (const std::string& key : keys) state[key] = TensorView::of(memory, {1});
    save(state, at(name));
  }
};

TEST_F(OddKeys, DuAndTheTreeCountTheEmptyKeyAndKeepSlashes) {
  save_to("ckpt", {"", "a/b", "a.b", "c/d/e", "c/d/f"});
  const json rows =
      json::parse(tilestone_command({"du", at("ckpt"), "--by-name", "--json"}).out)["rows"];
  std::vector<std::string> names;
  for (const auto& row : rows) names.push_back(row["name"]);
  EXPECT_THAT(names, testing::UnorderedElementsAre("", "a.b", "a/b", "c/d/*"));
  EXPECT_THAT(tilestone_command({"du", at("ckpt")}).out,
              AllOf(HasSubstr("\n\"\" "), HasSubstr("total 20 B")));
  EXPECT_THAT(tilestone_command({"ls", at("ckpt"), "--tree"}).out,
              AllOf(HasSubstr("|-- \"\" "), HasSubstr("|-- a/"), HasSubstr("5 tensors, 20 B")));
  EXPECT_THAT(tilestone_command({"ls", at("ckpt")}).out, HasSubstr("\n\"\" "));
}

TEST_F(OddKeys, AKeyIsFoundByTheTextThatLsShows) {
  save_to("ckpt", {"line\nbreak", "bell\x07"});
  for (const char* command : {"cat", "inspect"}) {
    EXPECT_EQ(tilestone_command({command, at("ckpt"), "line\\nbreak"}).code, kOk) << command;
    EXPECT_EQ(tilestone_command({command, at("ckpt"), "bell\\x07"}).code, kOk) << command;
    EXPECT_EQ(tilestone_command({command, at("ckpt"), "no\\n"}).code, kUsage) << command;
  }
}

TEST_F(OddKeys, EachPatternThatMatchesNothingIsNamed) {
  save_to("ckpt", {"weight", "bias"});
  for (const char* command : {"ls", "du"}) {
    const Ran ran = tilestone_command({command, at("ckpt"), "weight", "b*", "wieght"});
    EXPECT_EQ(ran.code, kUsage) << command;
    EXPECT_THAT(ran.out, AllOf(HasSubstr("weight"), HasSubstr("bias"))) << command;
    EXPECT_THAT(ran.err, AllOf(HasSubstr("no key matches \"wieght\";"), HasSubstr("weight")));
  }
  const Ran ran = tilestone_command({"diff", at("ckpt"), at("ckpt"), "--keys", "b*", "wieght"});
  EXPECT_EQ(ran.code, kUsage);
  EXPECT_THAT(ran.err, HasSubstr("no key of either checkpoint matches \"wieght\"; similar keys: "
                                 "weight"));
  save_to("other", {"weight"});
  EXPECT_EQ(tilestone_command({"diff", at("other"), at("ckpt"), "--keys", "bias"}).code, kDamaged);
}

TEST_F(OddKeys, LsTakesSeveralFiles) {
  save_to("ckpt", {"w"});
  for (const char* name : {"a.safetensors", "b.safetensors"}) {
    ASSERT_EQ(tilestone_command({"convert", at("ckpt"), at("hf")}).code, kOk);
    fs::copy_file(at("hf/model.safetensors"), at(name));
    fs::remove_all(at("hf"));
  }
  const Ran ran = tilestone_command({"ls", at("a.safetensors"), at("b.safetensors")});
  EXPECT_EQ(ran.code, kOk) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("a.safetensors:\n"), HasSubstr("b.safetensors:\n")));
}

TEST_F(OddKeys, DiffComparesIntegersExactlyAndOrdersKeysNaturally) {
  const auto save_ints = [&](const std::string& name, int64_t change) {
    std::vector<int64_t> large{int64_t{1} << 62, std::numeric_limits<int64_t>::min()};
    std::vector<uint8_t> flags{1};
    std::vector<float> third{0.1F};
    for (int64_t& each : large) each += change;
    flags[0] = change == 0;
    third[0] += static_cast<float>(change) / 2;
    StateDict state;
    state["layers.10"] = TensorView::of(large, {2});
    state["layers.2"] = TensorView::contiguous(flags.data(), DType::kBool, {1});
    state["third"] = TensorView::of(third, {1});
    save(state, at(name));
  };
  save_ints("a", 0);
  save_ints("b", 1);
  const Ran ran = tilestone_command({"diff", at("a"), at("b")});
  EXPECT_THAT(
      ran.out,
      StartsWith("layers.2: 1 of 1 element differ, by at most 1 (mean 1), first at [0]: "
                 "True and False\n"
                 "layers.10: 2 of 2 elements differ, by at most 1 (mean 1), first at [0]: "
                 "4611686018427387904 and 4611686018427387905\n"
                 "third: 1 of 1 element differ, by at most 0.5 (mean 0.5), first at [0]: 0.1 "
                 "and 0.6\n"));
  EXPECT_EQ(tilestone_command({"diff", at("a"), at("b"), "--atol", "0.5"}).code, kDamaged);
  EXPECT_EQ(tilestone_command({"diff", at("a"), at("b"), "--atol", "1"}).code, kOk);
  EXPECT_EQ(tilestone_command({"diff", at("a"), at("b"), "--atol", "inf"}).code, kOk);
  for (const char* atol : {"nan", "-1"}) {
    const Ran wrong = tilestone_command({"diff", at("a"), at("b"), "--atol=" + std::string(atol)});
    EXPECT_EQ(wrong.code, kUsage);
    EXPECT_THAT(wrong.err, HasSubstr("expected a number, at least 0"));
  }
}

TEST_F(OddKeys, TheCommonStateIsMentionedWhereItHasNoKey) {
  StateDict state;
  state["iteration"] = 3;
  SaveOptions options;
  options.dialect = dialect_named("megatron");
  save(state, at("ckpt"), options);
  for (const char* command : {"ls", "inspect", "du"}) {
    EXPECT_THAT(tilestone_command({command, at("ckpt")}).out, HasSubstr("tilestone cat --common"))
        << command;
  }
  EXPECT_THAT(tilestone_command({"cat", at("ckpt"), "iteration"}).err, HasSubstr("--common"));
  EXPECT_EQ(json::parse(tilestone_command({"ls", at("ckpt"), "--json"}).out)["has_common"], true);
}

TEST_F(OddKeys, FilesAreListedInNaturalOrder) {
  std::vector<std::string> keys;
  for (int i = 0; i < 12; ++i) keys.push_back("k" + std::to_string(i));
  save_to("ckpt", keys);
  ASSERT_EQ(
      tilestone_command({"convert", at("ckpt"), at("zarr"), "--to", "zarr", "--dialect", "pytorch"})
          .code,
      kOk);
  const std::string out = tilestone_command({"inspect", at("zarr")}).out;
  EXPECT_LT(out.find("k2/"), out.find("k10/")) << out;
}

TEST(Tables, ShortenTheColumnsThatAreNamedAndCountCharacters) {
  Table table({"STEP", "FOLDER", "WRITER"}, "rll");
  table.add({"1", "a-folder-with-a-long-name", "Megatron-Core (torch_dist 1.0.0)"});
  table.shorten({2, 1});
  EXPECT_EQ(table.text(45),
            "STEP  FOLDER                     WRITER\n"
            "   1  a-folder-with-a-long-name  Mega....0.0)\n");
  EXPECT_EQ(table.text(40),
            "STEP  FOLDER                WRITER\n"
            "   1  a-folder...long-name  Mega....0.0)\n");
  EXPECT_EQ(width_of("\xc3\xa4\x1b[31mx\x1b[0m"), 2u);  // a character of two bytes, a colour
  EXPECT_EQ(shortened("\xc3\xa4\xc3\xb6\xc3\xbc\xc3\x9f"
                      "567890",
                      7),
            "\xc3\xa4\xc3\xb6...90");
}

}  // namespace tilestone::cli::odd_keys_test
