#include "tilestone/cli/cli_testing.h"

#include <gtest/gtest.h>

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

}  // namespace tilestone::cli
