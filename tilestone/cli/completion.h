// Scripts by which shells complete commands and options.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tilestone::cli {

struct CommandWords {
  std::string name;
  std::vector<std::string> options;  // "--json"
};
// Prints the script for "bash" or "zsh".
int completion(const std::string& shell, const std::vector<CommandWords>& commands);

// How many letters must be inserted, removed or replaced to make `a` of `b`.
size_t edits(std::string_view a, std::string_view b);

}  // namespace tilestone::cli
