// A checkpoint that looks like an attack ends each command with exit code 4.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tilestone/cli/cli_testing.h"
#include "tilestone/cli/run.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli::unsafe_test {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A checkpoint of one tensor "w" in one data file.
class Unsafe : public FolderTest {
 protected:
  void SetUp() override {
    StateDict state;
    state["w"] = TensorView::allocate(DType::kFloat32, {4});
    save(state, checkpoint());
    for (const auto& entry : fs::directory_iterator(checkpoint())) {
      if (entry.path().extension() == ".distcp") data_ = entry.path();
    }
  }

  std::string checkpoint() const { return (folder_ / "checkpoint").string(); }
  fs::path metadata() const { return folder_ / "checkpoint" / ".metadata"; }
  const fs::path& data() const { return data_; }

  // Replaces the beginning of the data file's name in the metadata by `start`.
  void rename_in_metadata(const std::string& start) const {
    std::ifstream in(metadata(), std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), {});
    in.close();
    const size_t place = bytes.find(data_.filename().string());
    ASSERT_NE(place, std::string::npos);
    bytes.replace(place, start.size(), start);
    write(metadata(), bytes);
  }
  static void write(const fs::path& file, const std::string& bytes) {
    std::ofstream(file, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  // Moves the file out of the checkpoint and puts a link in its place.
  void link_out(const fs::path& file) const {
    fs::rename(file, folder_ / "outside");
    fs::create_symlink("../outside", file);
  }
  static void make_fifo(const fs::path& file) {
    fs::remove(file);
    ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  }

  void expect_unsafe(const std::vector<std::vector<std::string>>& commands,
                     const std::string& said) const {
    for (std::vector<std::string> words : commands) {
      words.insert(words.begin() + 1, checkpoint());
      const Ran ran = tilestone_command(words);
      EXPECT_EQ(ran.code, kUnsafe) << words[0];
      EXPECT_THAT(ran.out + ran.err, HasSubstr(said)) << words[0];
    }
  }

  const std::vector<std::vector<std::string>> every_command_{
      {"ls"}, {"inspect"}, {"verify"}, {"cat", "w"}, {"gc"}};
  const std::vector<std::vector<std::string>> reading_commands_{
      {"verify"}, {"verify", "--json"}, {"cat", "w"}};

 private:
  fs::path data_;
};

TEST_F(Unsafe, AnAbsoluteName) {
  rename_in_metadata("/");
  expect_unsafe(every_command_, "file name");
}

TEST_F(Unsafe, ANameThatClimbsOut) {
  rename_in_metadata("../");
  expect_unsafe(every_command_, "file name");
}

TEST_F(Unsafe, ANameThatHoldsNul) {
  rename_in_metadata(std::string(1, '\0'));
  expect_unsafe(every_command_, "file name");
}

TEST_F(Unsafe, ADataFileThatIsALinkOutOfTheCheckpoint) {
  link_out(data());
  expect_unsafe(reading_commands_, "a symbolic link leaves");
}

// A second checkpoint with two ranks, whose files hold copies of each other's tensors.
TEST_F(Unsafe, OneLinkOutOfTheCheckpointIsOneFindingAndTheOtherFilesAreChecked) {
  fs::remove_all(checkpoint());
  run_ranks(2, [&](Communicator comm) {
    StateDict state;
    for (const char* key : {"a", "b"}) {
      ShardedTensor tensor = ShardedTensor::from_rank_offsets(
          key, TensorView::allocate(DType::kFloat32, {100}), {}, {comm.rank()});
      tensor.holders = {0, 1};
      state[key] = tensor;
    }
    SaveOptions options;
    options.comm = comm;
    options.copies.emplace();
    options.copies->group = {0, 1};
    save(state, checkpoint(), options);
  });
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(checkpoint())) {
    if (entry.path().extension() == ".distcp") files.push_back(entry.path());
  }
  ASSERT_EQ(files.size(), 2u);
  link_out(files[0]);
  fs::resize_file(files[1], fs::file_size(files[1]) - 1);
  const std::vector<std::string> words = {"verify", checkpoint()};
  for (const bool repair : {false, true}) {
    std::vector<std::string> all = words;
    if (repair) all.emplace_back("--repair");
    const Ran ran = tilestone_command(all);
    EXPECT_EQ(ran.code, kUnsafe) << ran.err;
    EXPECT_EQ(ran.err, "");
    EXPECT_THAT(ran.out, HasSubstr("UNSAFE  " + files[0].filename().string()));
    EXPECT_THAT(ran.out, HasSubstr("TRUNCATED  " + files[1].filename().string()));
    EXPECT_TRUE(fs::is_symlink(files[0]));
  }
}

TEST_F(Unsafe, ADataFileThatIsAFifo) {
  make_fifo(data());
  expect_unsafe(reading_commands_, "regular file");
}

TEST_F(Unsafe, AMetadataFileThatIsALinkOutOfTheCheckpoint) {
  link_out(metadata());
  expect_unsafe(every_command_, "a symbolic link leaves");
}

TEST_F(Unsafe, AMetadataFileThatIsAFifo) {
  make_fifo(metadata());
  expect_unsafe(every_command_, "regular file");
}

TEST_F(Unsafe, AMetadataFileThatCallsAProgram) {
  using std::literals::operator""s;
  write(metadata(),
        "\x80\x02"
        "cposix\nsystem\nX\x04\0\0\0true\x85R."s);
  expect_unsafe(every_command_, ".metadata");
}

}  // namespace tilestone::cli::unsafe_test
