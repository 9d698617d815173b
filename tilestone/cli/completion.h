// Scripts by which shells complete commands and options.
#pragma once

#include <string>
#include <vector>

namespace tilestone::cli {

struct CommandWords {
  std::string name;
  std::vector<std::string> options;  // "--json"
};
// Prints the script for "bash" or "zsh".
int completion(const std::string& shell, const std::vector<CommandWords>& commands);

}  // namespace tilestone::cli
