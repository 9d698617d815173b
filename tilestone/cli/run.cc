#include "tilestone/cli/run.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <utility>
#include <vector>

#include "tilestone/cli/commands.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {
namespace {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kAlreadyExists:
      return kUsage;
    case ErrorCode::kNotFound:
    case ErrorCode::kIo:
    case ErrorCode::kTimeout:
      return kIoFailed;
    case ErrorCode::kUnsafe:
      return kUnsafe;
    default:
      return kDamaged;
  }
}

// CLI11 exits with codes of its own; help and version are 0, everything else is a usage error.
int parse_failed(const CLI::App& app, const CLI::ParseError& error) {
  return app.exit(error) == 0 ? kOk : kUsage;
}

}  // namespace

int run(int argc, const char* const* argv) {
  CLI::App app("Tilestone: what is in a checkpoint, and is it whole.", "tilestone");
  app.set_version_flag("--version", std::string("tilestone ") + kVersion);
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 ok, 1 damaged or different, 2 usage, 3 nothing there or I/O error, 4 unsafe "
      "content.");
  std::vector<std::pair<CLI::App*, Command>> commands;
  const auto add = [&](const char* name, const char* what, Command (*declare)(CLI::App&)) {
    CLI::App* sub = app.add_subcommand(name, what);
    commands.emplace_back(sub, declare(*sub));
  };
  add("ls", "List keys with dtype, shape, shards and bytes", add_ls);
  add("inspect", "Where a checkpoint came from, its files, and how a key is sharded", add_inspect);
  add("verify", "Read every byte and check every checksum", add_verify);
  add("cat", "Print the values of a tensor, a slice of one, or an object", add_cat);
  add("gc", "List, or remove, the files that failed saves have left", add_gc);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return parse_failed(app, error);
  }
  try {
    for (const auto& [sub, command] : commands) {
      if (sub->parsed()) return command();
    }
    return kUsage;
  } catch (...) {
    const Error error = current_error();
    std::fflush(stdout);
    fmt::print(stderr, "tilestone: {}\n", error.what());
    return exit_code(error.code());
  }
}

}  // namespace tilestone::cli
