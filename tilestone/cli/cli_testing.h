// Runs the command line as a user does, for tests.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace tilestone::cli {

struct Ran {
  int code = 0;
  std::string out;
  std::string err;
};

// Runs `tilestone WORDS...` in this process.
Ran tilestone_command(const std::vector<std::string>& words);

// A test with an empty folder of its own, which is removed afterwards.
class FolderTest : public testing::Test {
 protected:
  FolderTest();
  ~FolderTest() override;

  std::string at(const std::string& name) const { return (folder_ / name).string(); }

  const std::filesystem::path folder_;
};

}  // namespace tilestone::cli
