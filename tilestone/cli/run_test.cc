// The commands as a user runs them: arguments in, text and exit code out.
#include "tilestone/cli/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tilestone/cli/cli_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli::run_test {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

class Cli : public FolderTest {
 protected:
  // "w": [4, 6] float32 0 ... 23 from two ranks by rows; "step": 7.
  void SetUp() override {
    path_ = (folder_ / "checkpoint").string();
    run_ranks(2, [&](Communicator comm) {
      std::vector<float> mine(12);
      for (size_t i = 0; i < mine.size(); ++i) {
        mine[i] = static_cast<float>(12 * static_cast<size_t>(comm.rank()) + i);
      }
      StateDict state;
      state["w"] = ShardedTensor::from_rank_offsets(
          "w", TensorView::contiguous(mine.data(), DType::kFloat32, {2, 6}),
          {{0, comm.rank(), comm.size()}});
      state["step"] = 7;
      save(state, path_, {.comm = comm});
    });
  }

  std::string data_file() const {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      if (entry.path().extension() == ".distcp") return entry.path().string();
    }
    return "";
  }

  std::string path_;
};

TEST_F(Cli, LsShowsKeysShapesShardsAndTotals) {
  const Ran ran = tilestone_command({"ls", path_});
  EXPECT_EQ(ran.code, kOk);
  EXPECT_THAT(ran.out, HasSubstr("\nw     float32  [4, 6]       2   96 B\n"));
  EXPECT_THAT(ran.out, HasSubstr("\n1 tensor in 2 shards, 96 B; 1 object, "));
}

TEST_F(Cli, LsOfALongKeyWidensItsOwnLineOnly) {
  const std::string key(3000, 'k'), path = (folder_ / "long").string();
  StateDict state;
  state[key] = 1;
  state["step"] = 7;
  save(state, path);
  const Ran ran = tilestone_command({"ls", path});
  EXPECT_THAT(ran.out, HasSubstr("\n" + key + "  object"));
  EXPECT_THAT(ran.out, HasSubstr("\nstep  object"));
}

TEST_F(Cli, LsFiltersByPatternAndPrintsJson) {
  const Ran ran = tilestone_command({"ls", path_, "w*", "--json"});
  EXPECT_EQ(ran.code, kOk);
  const json out = json::parse(ran.out);
  ASSERT_EQ(out["tensors"].size(), 1u);
  EXPECT_EQ(out["tensors"][0]["shape"], (std::vector<int>{4, 6}));
  EXPECT_TRUE(out["objects"].empty());
  EXPECT_EQ(out["total"]["tensor_bytes"], 96);
}

TEST_F(Cli, InspectNamesTheWriterAndAKeysBoxes) {
  const Ran whole = tilestone_command({"inspect", path_});
  EXPECT_EQ(whole.code, kOk);
  EXPECT_THAT(whole.out, HasSubstr(writer_name()));
  EXPECT_THAT(whole.out, HasSubstr("manifest of 2 ranks"));
  const Ran key = tilestone_command({"inspect", path_, "w"});
  EXPECT_EQ(key.code, kOk);
  EXPECT_THAT(key.out, AllOf(HasSubstr("\n[0:2, 0:6]  "), HasSubstr("\n[2:4, 0:6]  ")));
  const json chunks = json::parse(tilestone_command({"inspect", path_, "w", "--json"}).out);
  EXPECT_EQ(chunks["chunks"][1]["offset"], (std::vector<int>{2, 0}));
}

TEST_F(Cli, InspectShowsHostsAndAttributes) {
  float mine = 1;
  StateDict state;
  state["w"] = TensorView::contiguous(&mine, DType::kFloat32, {1});
  const std::string path = (folder_ / "attributes").string();
  save(state, path, {.attributes = {{"iteration", "100"}, {"job", "a\tb"}}});
  const std::string text = tilestone_command({"inspect", path}).out;
  EXPECT_THAT(text, HasSubstr("\nattribute  iteration = 100\n"));
  EXPECT_THAT(text, testing::Not(HasSubstr("\t")));
  EXPECT_THAT(text, HasSubstr(" (1 rank)\n"));
  const json out = json::parse(tilestone_command({"inspect", path, "--json"}).out);
  EXPECT_EQ(out["attributes"]["job"], "a\tb");
  ASSERT_EQ(out["hosts"].size(), 1u);
  EXPECT_NE(out["hosts"][0], "");
}

TEST_F(Cli, InspectOfALargeJobListsFortyFilesAndShardsUnlessAskedForAll) {
  constexpr int kRanks = 50;
  const std::string many = (folder_ / "many").string();
  run_ranks(kRanks, [&](Communicator comm) {
    float mine = 1;
    StateDict state;
    state["w"] = ShardedTensor::from_rank_offsets(
        "w", TensorView::contiguous(&mine, DType::kFloat32, {1}), {{0, comm.rank(), kRanks}});
    save(state, many, {.comm = comm, .resources = {.threads = 1}});
  });
  const auto lines_with = [](const std::string& text, const std::string& word) {
    size_t count = 0;
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
      ++count;
    return count;
  };
  const std::string files = tilestone_command({"inspect", many}).out;
  EXPECT_EQ(lines_with(files, ".distcp"), 40u);
  EXPECT_THAT(files, HasSubstr("\nand 10 more files; --all lists them\n"));
  EXPECT_EQ(lines_with(tilestone_command({"inspect", many, "--all"}).out, ".distcp"), 50u);
  const std::string shards = tilestone_command({"inspect", many, "w"}).out;
  EXPECT_EQ(lines_with(shards, ".distcp"), 40u);
  EXPECT_THAT(shards, HasSubstr("\nand 10 more shards; --all lists them\n"));
  EXPECT_EQ(lines_with(tilestone_command({"inspect", many, "w", "--all"}).out, ".distcp"), 50u);
}

TEST_F(Cli, CatPrintsASliceAnObjectAndWritesNpy) {
  EXPECT_EQ(tilestone_command({"cat", path_, "w", "--slice", "1:3,4:"}).out,
            "[[10, 11],\n [16, 17]]\nfloat32 [2, 2]\n");
  EXPECT_EQ(tilestone_command({"cat", path_, "step"}).out, "7\n");
  const json values = json::parse(tilestone_command({"cat", path_, "w", "--json"}).out);
  EXPECT_EQ(values["values"][3][5], 23);
  const std::string npy = (folder_ / "w.npy").string();
  EXPECT_EQ(tilestone_command({"cat", path_, "w", "--npy", npy}).code, kOk);
  EXPECT_EQ(std::filesystem::file_size(npy) % 64, 96u % 64);
}

TEST_F(Cli, VerifyFindsAFlippedByteAndNamesKeyFileAndOffset) {
  EXPECT_EQ(tilestone_command({"verify", path_}).code, kOk);
  const std::string file = data_file();
  std::fstream damaged(file, std::ios::binary | std::ios::in | std::ios::out);
  damaged.seekg(0, std::ios::end);
  std::string bytes(static_cast<size_t>(damaged.tellg()), '\0');
  damaged.seekg(0);
  damaged.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  // An element of rank 0's or rank 1's shard: 5.0f or 17.0f.
  const float wanted = file.find("__0_0") != std::string::npos ? 5.0f : 17.0f;
  char pattern[sizeof wanted];
  std::memcpy(pattern, &wanted, sizeof wanted);
  const size_t place = bytes.rfind(std::string(pattern, sizeof pattern));
  ASSERT_NE(place, std::string::npos);
  damaged.seekp(static_cast<std::streamoff>(place));
  damaged.put(static_cast<char>(bytes[place] ^ 1));
  damaged.close();
  const Ran ran = tilestone_command({"verify", path_});
  EXPECT_EQ(ran.code, kDamaged);
  EXPECT_THAT(ran.out, HasSubstr(std::filesystem::path(file).filename().string()));
  EXPECT_THAT(ran.out, HasSubstr("key w"));
  EXPECT_FALSE(json::parse(tilestone_command({"verify", path_, "--json"}).out)["ok"]);
}

TEST_F(Cli, GcListsLeftoversAndRemovesThemOnlyOnRequest) {
  const std::string dead = "01234567-89ab-4cde-8f01-23456789abcd__0_0.distcp";
  std::ofstream(path_ + "/" + dead) << "half";
  // Without a .begun file it may have been copied to the location.
  EXPECT_EQ(tilestone_command({"gc", path_}).out, "no leftovers\n");
  std::ofstream(path_ + "/.tilestone/" + dead.substr(0, 36) + ".begun");
  std::ofstream(path_ + "/notes.txt") << "mine";
  const Ran dry = tilestone_command({"gc", path_});
  EXPECT_EQ(dry.code, kOk);
  EXPECT_THAT(dry.out, HasSubstr("\n" + dead + "        4 B  data file"));
  EXPECT_THAT(dry.out, HasSubstr("\n1: the checkpoint here is of the save "));
  EXPECT_THAT(dry.out, HasSubstr("\n2 leftovers, 4 B: not removed; --delete removes them\n"));
  const json listed = json::parse(tilestone_command({"gc", path_, "--json"}).out);
  EXPECT_EQ(listed["files"][1]["name"], dead);
  EXPECT_EQ(listed["bytes"], 4);
  EXPECT_FALSE(listed["removed"]);
  EXPECT_TRUE(std::filesystem::exists(path_ + "/" + dead));
  const Ran removed = tilestone_command({"gc", path_, "--delete"});
  EXPECT_EQ(removed.code, kOk);
  EXPECT_THAT(removed.out, HasSubstr("2 leftovers, 4 B: removed\n"));
  EXPECT_FALSE(std::filesystem::exists(path_ + "/" + dead));
  EXPECT_TRUE(std::filesystem::exists(path_ + "/notes.txt"));
  EXPECT_EQ(tilestone_command({"gc", path_}).out, "no leftovers\n");
  EXPECT_EQ(tilestone_command({"verify", path_}).code, kOk);
}

TEST_F(Cli, GcRefusesWhileASaveIsUnderWayAndWhereNothingIs) {
  EXPECT_EQ(tilestone_command({"gc", path_ + "-not-here"}).code, kIoFailed);
  const auto lock = posix_storage(path_)->claim(".tilestone/lock");
  ASSERT_NE(lock, nullptr);
  for (const char* word : {"--json", "--delete"}) {
    const Ran ran = tilestone_command({"gc", path_, word});
    EXPECT_EQ(ran.code, kIoFailed);
    EXPECT_THAT(ran.err, HasSubstr("a save is under way at " + path_ + ", by process " +
                                   std::to_string(::getpid()) + " on "));
  }
}

TEST_F(Cli, ExitCodesDistinguishUsageFromAbsence) {
  EXPECT_EQ(tilestone_command({"ls"}).code, kUsage);
  EXPECT_EQ(tilestone_command({"frobnicate"}).code, kUsage);
  EXPECT_THAT(tilestone_command({"frobnicate"}).err, HasSubstr("frobnicate"));
  EXPECT_EQ(tilestone_command({"cat", path_, "w", "--slice", "x"}).code, kUsage);
  for (const char* option : {"--slice", "--npy"}) {
    EXPECT_EQ(tilestone_command({"cat", path_, "w", option, ""}).code, kUsage);
  }
  const Ran dashed = tilestone_command({"cat", path_, "--key"});
  EXPECT_EQ(dashed.code, kUsage);
  EXPECT_THAT(dashed.err, HasSubstr("may begin with a dash after `--`"));
  EXPECT_THAT(tilestone_command({"cat", "--", path_, "--key"}).err, HasSubstr("key --key"));
  EXPECT_EQ(tilestone_command({"--help"}).code, kOk);
  const Ran absent = tilestone_command({"ls", path_ + "-not-here"});
  EXPECT_EQ(absent.code, kIoFailed);
  EXPECT_THAT(absent.err, HasSubstr("no checkpoint at"));
}

TEST_F(Cli, AKeyThatTheCheckpointLacksIsUsageForEverySubcommandThatTakesOne) {
  for (const char* command : {"cat", "inspect"}) {
    const Ran near = tilestone_command({command, path_, "ww"});
    EXPECT_EQ(near.code, kUsage) << near.err;
    EXPECT_THAT(near.err, HasSubstr("key ww"));
    EXPECT_THAT(near.err, HasSubstr("similar keys: w"));
    EXPECT_EQ(tilestone_command({command, path_, "ww", "--json"}).code, kUsage);
    EXPECT_EQ(tilestone_command({command, path_ + "-not-here", "w"}).code, kIoFailed);
  }
}

TEST_F(Cli, APathThatIsAFileOrALinkToNowhereIsNamedByEverySubcommand) {
  const std::string file = data_file(), link = (folder_ / "link").string();
  const std::string pipe = (folder_ / "pipe.pt").string();
  std::filesystem::create_directory_symlink(folder_ / "absent", link);
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"ls"}, {"inspect"}, {"verify"}, {"cat", "w"}, {"gc"}, {"gc", "--delete"}}) {
    const auto run_at = [&](const std::string& path) {
      std::vector<std::string> all = words;
      all.insert(all.begin() + 1, path);
      return tilestone_command(all);
    };
    const Ran on_file = run_at(file), on_link = run_at(link), on_pipe = run_at(pipe);
    EXPECT_EQ(on_file.code, kIoFailed);
    EXPECT_THAT(on_file.err, AllOf(HasSubstr("it is a file"), HasSubstr(file)));
    EXPECT_EQ(on_link.code, kIoFailed);
    EXPECT_THAT(on_link.err, AllOf(HasSubstr("symbolic link"), HasSubstr(link)));
    EXPECT_EQ(on_pipe.code, kIoFailed);
    EXPECT_THAT(on_pipe.err, AllOf(HasSubstr("neither a file nor a directory"), HasSubstr(pipe)));
  }
}

TEST_F(Cli, LinksThatLeadOutAreFollowedByEverySubcommandWhenAsked) {
  const std::filesystem::path elsewhere = folder_ / "elsewhere";
  std::filesystem::create_directories(elsewhere);
  for (const std::string& name : {data_file(), path_ + "/.metadata"}) {
    const auto target = elsewhere / std::filesystem::path(name).filename();
    std::filesystem::rename(name, target);
    std::filesystem::create_symlink(target, name);
  }
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"ls", path_},
                                             {"inspect", path_, "w"},
                                             {"verify", path_},
                                             {"cat", path_, "w"},
                                             {"gc", path_}}) {
    const Ran refused = tilestone_command(words);
    EXPECT_EQ(refused.code, kUnsafe) << words[0];
    EXPECT_THAT(refused.err, HasSubstr("--follow-links"));
    std::vector<std::string> asked = words;
    asked.emplace_back("--follow-links");
    const Ran followed = tilestone_command(asked);
    EXPECT_EQ(followed.code, kOk) << words[0] << ": " << followed.err;
  }
}

TEST_F(Cli, AMissingDataFileIsDamageAndAMissingCheckpointIsNot) {
  const std::string name = std::filesystem::path(data_file()).filename();
  std::filesystem::remove(data_file());
  const Ran read = tilestone_command({"cat", path_, "w"});
  EXPECT_EQ(read.code, kDamaged);
  EXPECT_THAT(read.err, AllOf(HasSubstr("a data file of the checkpoint is missing"),
                              HasSubstr(name), HasSubstr("`tilestone verify` shows")));
  EXPECT_EQ(tilestone_command({"verify", path_}).code, kDamaged);
  EXPECT_EQ(tilestone_command({"ls", path_}).code, kOk);
  EXPECT_EQ(tilestone_command({"cat", path_ + "-typo", "w"}).code, kIoFailed);
}

TEST_F(Cli, ANameThatLeavesTheDirectoryIsUnsafe) {
  // The metadata names its data files; one that points outside is refused.
  const std::string metadata = path_ + "/.metadata";
  std::ifstream in(metadata, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  in.close();
  const std::string name = std::filesystem::path(data_file()).filename().string();
  const size_t place = bytes.find(name);
  ASSERT_NE(place, std::string::npos);
  bytes.replace(place, 3, "../");
  std::ofstream(metadata, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  EXPECT_EQ(tilestone_command({"ls", path_}).code, kUnsafe);
}

}  // namespace tilestone::cli::run_test
