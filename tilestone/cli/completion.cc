#include "tilestone/cli/completion.h"

#include <fmt/format.h>

#include <algorithm>

#include "tilestone/cli/run.h"

namespace tilestone::cli {

int completion(const std::string& shell, const std::vector<CommandWords>& commands) {
  std::string names, cases;
  for (const CommandWords& command : commands) {
    names += (names.empty() ? "" : " ") + command.name;
    std::string options;
    for (const std::string& option : command.options)
      options += (options.empty() ? "" : " ") + option;
    cases += fmt::format("    {}) words=\"{}\" ;;\n", command.name, options);
  }
  if (shell == "zsh") {
    fmt::print(
        "# eval \"$(tilestone completion zsh)\" in ~/.zshrc\n"
        "autoload -U +X compinit && compinit\n"
        "autoload -U +X bashcompinit && bashcompinit\n");
  } else {
    fmt::print("# eval \"$(tilestone completion bash)\" in ~/.bashrc\n");
  }
  fmt::print(
      "_tilestone() {{\n"
      "  local current=${{COMP_WORDS[COMP_CWORD]}} words=\n"
      "  COMPREPLY=()\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    COMPREPLY=($(compgen -W \"{} --help --version\" -- \"$current\"))\n"
      "    return\n"
      "  fi\n"
      "  [[ $current == -* ]] || return\n"
      "  case ${{COMP_WORDS[1]}} in\n{}"
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
      "}}\n"
      "complete -o default -F _tilestone tilestone\n",
      names, cases);
  return kOk;
}

size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace tilestone::cli
