// Keys whose files need longer paths than the system allows.
#include <gtest/gtest.h>

#include <climits>
#include <filesystem>
#include <fstream>
#include <string>

#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::long_names_test {

SaveOptions zarr(bool overwrite = false) {
  SaveOptions options;
  options.format = zarr_format();
  options.overwrite = overwrite;
  options.resources.threads = 1;
  return options;
}

// A path of directories, with this many bytes.
std::string path_of(size_t bytes) {
  std::string path(bytes, 'd');
  for (size_t at = 199; at + 1 < bytes; at += 200) path[at] = '/';
  return path;
}

StateDict state_of(const std::string& key) {
  StateDict state;
  state[key] = counting(DType::kFloat32, {3}, 5);
  return state;
}

TEST(LongNames, AKeyThatNeedsATooLongPathIsRefusedBeforeAnythingIsWritten) {
  const TempDirectory folder;
  const std::string path = folder.path() + "/ckpt";
  // "/.zarray" is the longest name of a tensor's file here. A directory beside the location has a
  // name that is 48 bytes longer. PATH_MAX counts a NUL.
  const size_t fits = PATH_MAX - 1 - path.size() - 48 - 1 - std::string("/.zarray").size();
  for (const size_t bytes : {fits + 1, size_t{3 * PATH_MAX}}) {
    const std::string key = path_of(bytes);
    try {
      save(state_of(key), path, zarr());
      ADD_FAILURE() << "saved " << bytes;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_EQ(error.key(), key);
      EXPECT_NE(error.message().find("a path that is too long"), std::string::npos);
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  }
  const std::string key = path_of(fits);
  for (const bool overwrite : {false, true}) save(state_of(key), path, zarr(overwrite));
  const Checkpoint checkpoint = Checkpoint::open(path);
  EXPECT_EQ(elements(checkpoint.read(key)), elements(counting(DType::kFloat32, {3}, 5)));
  EXPECT_TRUE(std::ifstream(path + "/" + key + "/.zarray").good());
}

// As saves left it that did not refuse such keys.
TEST(LongNames, GcRemovesADirectoryInWhichPathsAreTooLongFromOutside) {
  const TempDirectory folder;
  const std::string path = folder.path() + "/ckpt";
  save(state_of("w"), path, zarr());
  const std::string left = folder.path() + "/.ckpt.tilestone-01234567-89ab-4def-8123-456789abcdef";
  const auto inside = posix_storage(left);
  inside->directories()->make("");
  const std::string name = path_of(PATH_MAX - 1);
  inside->directories()->make(name.substr(0, name.rfind('/')));
  inside->create(name)->close();
  ASSERT_TRUE(std::filesystem::exists(left));
  EXPECT_EQ(find_leftovers(path).size(), 1u);
  EXPECT_EQ(remove_leftovers(path).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(Checkpoint::open(path).verify().ok());
}

}  // namespace tilestone::long_names_test
