#include "tilestone/cli/cli_testing.h"

#include <gtest/gtest.h>

#include <system_error>

#include "tilestone/cli/run.h"

namespace tilestone::cli {

Ran tilestone_command(const std::vector<std::string>& words) {
  std::vector<const char*> argv{"tilestone"};
  for (const std::string& word : words) argv.push_back(word.c_str());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Ran ran;
  ran.code = run(static_cast<int>(argv.size()), argv.data());
  ran.out = testing::internal::GetCapturedStdout();
  ran.err = testing::internal::GetCapturedStderr();
  return ran;
}

FolderTest::FolderTest()
    : folder_(std::filesystem::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name()) {
  std::filesystem::remove_all(folder_);
  std::filesystem::create_directories(folder_);
}

FolderTest::~FolderTest() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace tilestone::cli
