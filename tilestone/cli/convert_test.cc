// convert, diff, du and ls --tree, as a user runs them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tilestone/base/natural_order.h"
#include "tilestone/cli/cli_testing.h"
#include "tilestone/cli/key_tree.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli::convert_test {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class Convert : public FolderTest {
 protected:
  // A training state from two ranks: model.layers.{0,2,10}.weight [4, 6] float32 by rows,
  // model.head bfloat16, optimizer.step, and the object "epoch".
  void SetUp() override { save_to("ckpt", 0); }

  void save_to(const std::string& name, float changed) const {
    run_ranks(2, [&](Communicator comm) {
      StateDict model;
      std::vector<std::vector<float>> memory;
      memory.reserve(3);
      for (const int layer : {0, 2, 10}) {
        std::vector<float>& mine = memory.emplace_back(12);
        for (size_t i = 0; i < mine.size(); ++i) {
          mine[i] = static_cast<float>(100 * layer + 12 * comm.rank() + static_cast<int>(i));
        }
        if (layer == 2 && comm.rank() == 1) mine[3] += changed;
        const std::string key = "layers." + std::to_string(layer) + ".weight";
        model[key] = ShardedTensor::from_rank_offsets(
            "model." + key, TensorView::contiguous(mine.data(), DType::kFloat32, {2, 6}),
            {{0, comm.rank(), comm.size()}});
      }
      std::vector<uint16_t> head(5, 0x3f80);
      model["head"] = TensorView::contiguous(head.data(), DType::kBFloat16, {5});
      std::vector<int64_t> step{7};
      StateDict state;
      state["model"] = model;
      state["optimizer"] = StateDict();
      state["optimizer"].as<StateDict>()["step"] =
          TensorView::contiguous(step.data(), DType::kInt64, {1});
      state["epoch"] = 3;
      save(state, at(name), {.comm = comm});
    });
  }

  static std::vector<std::string> keys_of(const std::string& path) {
    return Checkpoint::open(path).keys();
  }
};

TEST_F(Convert, OnlyTheModelBecomesAFolderOfSafetensors) {
  const Ran ran = tilestone_command({"convert", at("ckpt"), at("hf"), "--only", "model"});
  EXPECT_EQ(ran.code, kOk) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("safetensors"), HasSubstr("4 tensors"),
                             HasSubstr("left out 2 keys")));
  EXPECT_THAT(keys_of(at("hf")),
              ElementsAre("head", "layers.0.weight", "layers.10.weight", "layers.2.weight"));
  EXPECT_TRUE(fs::exists(folder_ / "hf" / "model.safetensors"));
  EXPECT_TRUE(fs::exists(folder_ / "hf" / "model.safetensors.index.json"));
  const TensorView weight = Checkpoint::open(at("hf")).read("layers.2.weight");
  EXPECT_EQ(weight.elements<float>()[23], 223.f);
  const json verified = json::parse(tilestone_command({"verify", at("hf"), "--json"}).out);
  EXPECT_TRUE(verified["ok"]);
  EXPECT_EQ(verified["items_without_checksum"], 0);
  const Ran same = tilestone_command(
      {"diff", at("ckpt"), at("hf"), "--rename", "^model\\.(.*)=\\1", "--keys", "layers.*"});
  EXPECT_EQ(same.code, kOk) << same.out << same.err;
}

TEST_F(Convert, ARoundTripThroughEachFormatChangesNothing) {
  for (const std::string format : {"torch_dist", "zarr"}) {
    for (const std::string dialect : {"pytorch", "megatron"}) {
      const std::string name = at(format + "_" + dialect);
      const Ran there =
          tilestone_command({"convert", at("ckpt"), name, "--to", format, "--dialect", dialect});
      EXPECT_EQ(there.code, kOk) << there.err;
      EXPECT_EQ(tilestone_command({"verify", name}).code, kOk) << name;
      const Ran back = tilestone_command(
          {"convert", name, name + "_back", "--to", "torch_dist", "--dialect", "pytorch"});
      EXPECT_EQ(back.code, kOk) << back.err;
      const Ran same = tilestone_command({"diff", at("ckpt"), name + "_back"});
      EXPECT_EQ(same.code, kOk) << name << same.out << same.err;
    }
  }
}

TEST_F(Convert, WhatSafetensorsCantHoldIsRefusedByKeyAndLeavesNoFolder) {
  const Ran object = tilestone_command({"convert", at("ckpt"), at("hf")});
  EXPECT_EQ(object.code, kUsage);
  EXPECT_THAT(object.err, AllOf(HasSubstr("epoch"), HasSubstr("--only model")));
  const Ran none = tilestone_command({"convert", at("ckpt"), at("hf"), "--keys", "model*", "no*"});
  EXPECT_EQ(none.code, kUsage);
  EXPECT_THAT(none.err, HasSubstr("no key matches \"no*\""));
  const Ran folder =
      tilestone_command({"convert", at("ckpt"), at("hf"), "--rename-file", folder_.string()});
  EXPECT_EQ(folder.code, kIoFailed);
  EXPECT_THAT(folder.err, HasSubstr("cannot read the rules"));
  const Ran twice = tilestone_command(
      {"convert", at("ckpt"), at("hf"), "--keys", "model.layers*", "--rename", ".*=same"});
  EXPECT_EQ(twice.code, kUsage);
  EXPECT_THAT(twice.err, HasSubstr("get the same new key"));
  const Ran rule =
      tilestone_command({"convert", at("ckpt"), at("hf"), "--only", "model", "--rename", "(=x"});
  EXPECT_EQ(rule.code, kUsage);
  EXPECT_THAT(rule.err, HasSubstr("not a regular expression"));
  EXPECT_FALSE(fs::exists(folder_ / "hf"));
  EXPECT_EQ(tilestone_command({"convert", at("ckpt"), at("ckpt"), "--only", "model"}).code,
            kIoFailed);
}

TEST_F(Convert, RulesFromAFileAndCastsAndShardSizesApply) {
  std::ofstream(at("rules"))
      << "# names of the model\n\n^layers\\.(\\d+)\\.weight$=h.\\1.w\nhead=\n";
  const std::vector<std::string> words = {"convert", at("ckpt"),      at("hf"),    "--only",
                                          "model",   "--rename-file", at("rules"), "--cast",
                                          "float16", "--shard-size",  "60"};
  std::vector<std::string> dry = words;
  dry.push_back("--dry-run");
  dry.push_back("--json");
  const json plan = json::parse(tilestone_command(dry).out);
  EXPECT_FALSE(plan["written"]);
  EXPECT_EQ(plan["keys"][0]["key"], "h.0.w");
  EXPECT_EQ(plan["keys"][0]["from"], "model.layers.0.weight");
  EXPECT_EQ(plan["keys"][0]["file"], "model-00001-of-00003.safetensors");
  EXPECT_FALSE(fs::exists(folder_ / "hf"));
  const Ran ran = tilestone_command(words);
  EXPECT_EQ(ran.code, kOk) << ran.err;
  EXPECT_THAT(keys_of(at("hf")), ElementsAre("h.0.w", "h.10.w", "h.2.w"));
  const Checkpoint made = Checkpoint::open(at("hf"));
  EXPECT_EQ(made.metadata().find_tensor("h.2.w")->dtype, DType::kFloat16);
  EXPECT_EQ(made.metadata().files.size(), 3u);
  const Ran wrong = tilestone_command({"convert", at("ckpt"), at("no"), "--rename", "^=\\1"});
  EXPECT_THAT(wrong.err, HasSubstr("names group 1, but it has 0"));
  // One file alone is a location too.
  EXPECT_THAT(keys_of(at("hf") + "/model-00002-of-00003.safetensors"), ElementsAre("h.10.w"));
}

TEST_F(Convert, SafetensorsBecomeATorchDistCheckpoint) {
  ASSERT_EQ(tilestone_command({"convert", at("ckpt"), at("hf"), "--only", "model"}).code, kOk);
  ASSERT_EQ(tilestone_command({"convert", at("hf"), at("back"), "--rename", "^=model."}).code, kOk);
  EXPECT_EQ(Checkpoint::open(at("back")).format_name(), "torch_dist");
  const Ran same = tilestone_command({"diff", at("ckpt"), at("back"), "--keys", "model.*"});
  EXPECT_EQ(same.code, kOk) << same.out;
}

TEST_F(Convert, DiffNamesWhatDiffersAndHowMuch) {
  save_to("other", 0.5);
  const Ran ran = tilestone_command({"diff", at("ckpt"), at("other")});
  EXPECT_EQ(ran.code, kDamaged);
  EXPECT_THAT(ran.out, HasSubstr("model.layers.2.weight: 1 of 24 elements differ, by at most 0.5 "
                                 "(mean 0.0208), first at [2, 3]: 215 and 215.5\n"));
  EXPECT_THAT(ran.out, HasSubstr("1 difference: 4 tensors and 1 object are equal"));
  EXPECT_EQ(tilestone_command({"diff", at("ckpt"), at("other"), "--atol", "0.5"}).code, kOk);
  ASSERT_EQ(tilestone_command({"convert", at("ckpt"), at("part"), "--to", "zarr", "--keys",
                               "model.*", "--cast", "float64", "--rename", "head$=tail"})
                .code,
            kOk);
  const json out = json::parse(tilestone_command({"diff", at("ckpt"), at("part"), "--json"}).out);
  std::map<std::string, std::string> found;
  for (const auto& entry : out["differences"]) found[entry["key"]] = entry["difference"];
  EXPECT_EQ(found["epoch"], "only in a");
  EXPECT_EQ(found["model.tail"], "only in b");
  EXPECT_EQ(found["model.layers.0.weight"], "dtypes");
  EXPECT_EQ(out["differences"][2].count("max"), 0u) << out;
}

TEST_F(Convert, DuSumsByPrefixRankAndFile) {
  const json prefixes =
      json::parse(tilestone_command({"du", at("ckpt"), "--depth", "1", "--json"}).out);
  ASSERT_EQ(prefixes["rows"].size(), 3u);  // the object's archive is larger than the tensors
  EXPECT_EQ(prefixes["rows"][1]["name"], "model.*");
  EXPECT_EQ(prefixes["rows"][1]["tensors"], 4);
  EXPECT_EQ(prefixes["rows"][1]["bytes"], 3 * 96 + 10);
  const json ranks =
      json::parse(tilestone_command({"du", at("ckpt"), "--by", "rank", "--json", "--by-name"}).out);
  ASSERT_EQ(ranks["rows"].size(), 2u);
  EXPECT_EQ(ranks["rows"][1]["name"], "rank 1");
  EXPECT_EQ(json::parse(tilestone_command({"du", at("ckpt"), "--by", "file", "--json"}).out)["rows"]
                .size(),
            2u);
  EXPECT_THAT(tilestone_command({"du", at("ckpt")}).out, HasSubstr("model.layers.*"));
}

TEST_F(Convert, TheTreeOfKeysIsInNaturalOrder) {
  const Ran ran = tilestone_command({"ls", at("ckpt"), "--tree", "--depth", "3"});
  EXPECT_EQ(ran.code, kOk);
  const size_t two = ran.out.find("|       |-- 2 "), ten = ran.out.find("|       `-- 10 ");
  ASSERT_NE(two, std::string::npos) << ran.out;
  EXPECT_LT(two, ten);
  EXPECT_THAT(ran.out, Not(HasSubstr("weight")));
  const json tree = json::parse(tilestone_command({"ls", at("ckpt"), "--tree", "--json"}).out);
  EXPECT_EQ(tree["children"]["model"]["children"]["layers"]["tensors"], 3);
  const Ran list = tilestone_command({"ls", at("ckpt")});
  EXPECT_LT(list.out.find("layers.2."), list.out.find("layers.10."));
}

TEST_F(Convert, APatternThatMatchesNothingIsAUsageError) {
  const Ran ran = tilestone_command({"ls", at("ckpt"), "model.layers.0.wieght"});
  EXPECT_EQ(ran.code, kUsage);
  EXPECT_THAT(ran.err, HasSubstr("model.layers.0.weight"));
}

TEST_F(Convert, TheLayoutIsAPageOfRanksFilesAndTensors) {
  const Ran ran = tilestone_command({"layout", at("ckpt"), "-o", at("layout.html")});
  EXPECT_EQ(ran.code, kOk) << ran.err;
  std::ifstream file(at("layout.html"));
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(page, AllOf(HasSubstr("What each rank wrote"), HasSubstr("What each file holds"),
                          HasSubstr(">rank 1</div>"), HasSubstr("How tensors are divided"),
                          HasSubstr("model.layers.0.weight")));
  EXPECT_THAT(page, AllOf(HasSubstr("When each rank planned, staged and wrote"),
                          HasSubstr("<title>rank 1: writing 0.")));
  // A picture's left edge cuts nothing: no text ends there, whatever its font.
  EXPECT_THAT(page, Not(HasSubstr("text-anchor=\"end\"")));
  EXPECT_EQ(tilestone_command({"layout", at("ckpt"), "-o", at("no/page.html")}).code, kIoFailed);
}

TEST_F(Convert, AWrongPathIsSaidToBeWrong) {
  std::ofstream(at("notes.txt")) << "text";
  for (const char* command : {"ls", "inspect", "verify", "du"}) {
    const Ran absent = tilestone_command({command, at("absent")});
    EXPECT_EQ(absent.code, kIoFailed) << command;
    EXPECT_THAT(absent.err, HasSubstr("there is no such file or directory")) << command;
    const Ran file = tilestone_command({command, at("notes.txt")});
    EXPECT_EQ(file.code, kIoFailed) << command;
    EXPECT_THAT(file.err, AllOf(HasSubstr("notes.txt: it is a file"),
                                HasSubstr("name the directory of the checkpoint")))
        << command;
  }
}

TEST_F(Convert, EachCommandsHelpHasTheExitCodes) {
  for (const char* command : {"ls", "convert", "diff", "du", "verify"}) {
    EXPECT_THAT(tilestone_command({command, "--help"}).out, HasSubstr("4    unsafe content"))
        << command;
  }
}

TEST_F(Convert, CompletionKnowsCommandsAndTheirOptions) {
  for (const char* shell : {"bash", "zsh"}) {
    const Ran ran = tilestone_command({"completion", shell});
    EXPECT_EQ(ran.code, kOk);
    EXPECT_THAT(ran.out, AllOf(HasSubstr("ls inspect verify"), HasSubstr("--shard-size"),
                               HasSubstr("complete -o default -F _tilestone tilestone")));
  }
  EXPECT_EQ(tilestone_command({"completion", "fish"}).code, kUsage);
}

TEST_F(Convert, CatOfTheBeginningOfKeysPrintsASubtree) {
  const Ran ran = tilestone_command({"cat", at("ckpt"), "model"});
  EXPECT_EQ(ran.code, kOk);
  EXPECT_THAT(ran.out, HasSubstr("model.head: bfloat16 [5] [1.0,1.0,1.0,1.0,1.0]\n"));
  EXPECT_THAT(ran.out, HasSubstr("model.layers.10.weight: float32 [4, 6]\n"));
  const json out = json::parse(tilestone_command({"cat", at("ckpt"), "optimizer", "--json"}).out);
  EXPECT_EQ(out["entries"]["optimizer.step"]["values"], json::parse("[7]"));
  EXPECT_EQ(tilestone_command({"cat", at("ckpt"), "mod"}).code, kUsage);
}

TEST_F(Convert, CatOfAnObjectAsJsonHasItsValue) {
  const Value value =
      Value::dict({{"a", Value::list({1, 2.5, "x", nullptr, true})}, {"b", Value::tuple({})}});
  StateDict state;
  state["wrapped"] = ShardedObject::make("w", value, {1}, {0});
  save(state, at("objects"));
  const json out =
      json::parse(tilestone_command({"cat", at("objects"), "w/shard_0_1", "--json"}).out);
  EXPECT_EQ(out["value"], json::parse(R"({"a": [1, 2.5, "x", null, true], "b": []})"));
}

TEST_F(Convert, AFileOfTorchSaveIsOpenedAsACheckpoint) {
  ASSERT_EQ(tilestone_command({"convert", at("ckpt"), at("run.pt")}).code, kOk);
  const Ran list = tilestone_command({"ls", at("run.pt")});
  EXPECT_EQ(list.code, kOk) << list.err;
  EXPECT_THAT(list.out, AllOf(HasSubstr("model.layers.10.weight  float32   [4, 6]"),
                              HasSubstr("epoch                   object")));
  EXPECT_THAT(tilestone_command({"inspect", at("run.pt")}).out, HasSubstr("torch_save"));
  EXPECT_THAT(tilestone_command({"cat", at("run.pt"), "model.head"}).out,
              HasSubstr("[1, 1, 1, 1, 1]"));
  EXPECT_EQ(tilestone_command({"cat", at("run.pt"), "epoch"}).out, "3\n");
  const Ran checked = tilestone_command({"verify", at("run.pt")});
  EXPECT_EQ(checked.code, kOk) << checked.out;
  EXPECT_EQ(tilestone_command({"diff", at("ckpt"), at("run.pt")}).code, kOk);
  EXPECT_EQ(Checkpoint::open(at("run.pt")).read_object("epoch").as_int(), 3);
  // A flipped byte of a tensor is found, and its key named.
  std::fstream file(at("run.pt"), std::ios::in | std::ios::out | std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  const float element = 1000 + 12 + 3;  // of model.layers.10.weight
  const size_t place = bytes.find(std::string(reinterpret_cast<const char*>(&element), 4));
  ASSERT_NE(place, std::string::npos);
  file.seekp(static_cast<std::streamoff>(place));
  file.put(static_cast<char>(bytes[place] ^ 1));
  file.close();
  const Ran damaged = tilestone_command({"verify", at("run.pt")});
  EXPECT_EQ(damaged.code, kDamaged);
  EXPECT_THAT(damaged.out, HasSubstr("key model.layers.10.weight"));
  EXPECT_THAT(tilestone_command({"cat", at("run.pt"), "model.layers.10.weight"}).err,
              HasSubstr("is damaged"));
  std::ofstream(at("old.pt")) << "not a zip archive";
  const Ran refused = tilestone_command({"ls", at("old.pt")});
  EXPECT_EQ(refused.code, kUsage);
  EXPECT_THAT(refused.err, HasSubstr("before PyTorch 1.6"));
  fs::create_directory(at("folder"));
  std::ofstream(at("folder") + "/:torch_save") << "the mark's name";
  EXPECT_EQ(tilestone_command({"ls", at("folder")}).code, kIoFailed);
}

TEST_F(Convert, TruncatedFilesAreOneLineEach) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(at("ckpt"))) {
    if (entry.path().extension() == ".distcp") files.push_back(entry.path());
  }
  ASSERT_EQ(files.size(), 2u);
  std::sort(files.begin(), files.end());
  const std::string size = std::to_string(fs::file_size(files[1]));
  fs::resize_file(files[1], 100);
  const Ran ran = tilestone_command({"verify", at("ckpt")});
  EXPECT_EQ(ran.code, kDamaged);
  EXPECT_THAT(ran.out, testing::ContainsRegex("TRUNCATED  " + files[1].filename().string() +
                                              "  100 bytes of [0-9,]+; it lacks 3 keys, first "
                                              "model.layers"));
  EXPECT_THAT(ran.out, AllOf(Not(HasSubstr("DAMAGED")), HasSubstr("--all lists each item")));
  const Ran all = tilestone_command({"verify", at("ckpt"), "--all"});
  EXPECT_THAT(all.out, AllOf(Not(HasSubstr("TRUNCATED")), HasSubstr("key model.layers.2.weight")));
  const json out = json::parse(tilestone_command({"verify", at("ckpt"), "--json"}).out);
  EXPECT_EQ(std::to_string(out["truncated"][0]["expected"].get<uint64_t>()), size);
  EXPECT_EQ(out["truncated"][0]["keys"], 3);
}

TEST_F(Convert, NoCheckpointLooksBeforeItSpeaks) {
  save_to("step-9", 0);
  save_to("step-100", 0);
  const Ran above = tilestone_command({"inspect", folder_.string()});
  EXPECT_EQ(above.code, kIoFailed);
  EXPECT_THAT(above.err, HasSubstr("3 subdirectories are checkpoints, the last is step-100"));
  fs::create_directories(folder_ / "stock");
  std::ofstream(folder_ / "stock" / "__0_0.distcp") << "x";
  EXPECT_THAT(tilestone_command({"ls", at("stock")}).err, HasSubstr("no .metadata"));
  fs::create_directories(folder_ / "torch");
  std::ofstream(folder_ / "torch" / "model.pt") << "x";
  EXPECT_THAT(tilestone_command({"ls", at("torch")}).err,
              HasSubstr("model.pt looks like a file of torch.save"));
  const Ran cleaned = tilestone_command({"gc", at("torch")});
  EXPECT_EQ(cleaned.code, kIoFailed);
  EXPECT_THAT(cleaned.err, HasSubstr("model.pt looks like a file of torch.save"));
}

TEST(NaturalOrder, NumbersAreComparedByValue) {
  EXPECT_TRUE(natural_less("a.2", "a.10"));
  EXPECT_FALSE(natural_less("a.10", "a.2"));
  EXPECT_TRUE(natural_less("a.99999999999999999999998", "a.99999999999999999999999"));
  EXPECT_TRUE(natural_less("a", "a.1"));
  EXPECT_TRUE(natural_less("1", "a"));
  EXPECT_NE(natural_less("a01", "a1"), natural_less("a1", "a01"));
  EXPECT_FALSE(natural_less("a1b", "a1b"));
}

TEST(Tables, AreShortenedInTheMiddleToTheWidth) {
  Table table({"KEY", "BYTES"}, "lr");
  table.add({"model.layers.0.self_attention.linear_qkv.weight", "12 B"});
  EXPECT_EQ(table.text(30), "KEY                      BYTES\nmodel.laye...qkv.weight   12 B\n");
  EXPECT_THAT(table.text(80), HasSubstr("self_attention"));
  EXPECT_THAT(table.text(0), HasSubstr("self_attention"));
  EXPECT_EQ(shortened("\xc3\xa4\xc3\xb6\xc3\xbc\xc3\xa4\xc3\xb6\xc3\xbc", 5),
            "\xc3\xa4...\xc3\xbc");
}

}  // namespace tilestone::cli::convert_test
