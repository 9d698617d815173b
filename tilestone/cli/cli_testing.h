// Runs the command line as a user does, for tests.
#pragma once

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

}  // namespace tilestone::cli
