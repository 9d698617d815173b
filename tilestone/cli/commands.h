// The subcommands. add_X declares X's words; the function it returns does the work and returns
// the exit code. Errors leave as tilestone::Error.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tilestone::cli {

using Command = std::function<int()>;

Command add_ls(CLI::App& app);
Command add_inspect(CLI::App& app);
Command add_verify(CLI::App& app);
Command add_cat(CLI::App& app);
Command add_gc(CLI::App& app);

}  // namespace tilestone::cli
