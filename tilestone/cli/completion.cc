#include "tilestone/cli/completion.h"

#include <fmt/format.h>

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

}  // namespace tilestone::cli
