#include "tilestone/cli/run.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tilestone/cli/commands.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {
namespace {

using Command = std::function<int()>;

Command add_ls(CLI::App& app) {
  auto options = std::make_shared<LsOptions>();
  app.add_option("checkpoint", options->path, "Directory of the checkpoint")->required();
  app.add_option("pattern", options->patterns, "Only keys that match one of these (*, ?, [...])");
  app.add_flag("--json", options->json, "Print JSON");
  app.add_flag("--by-size", options->by_size, "Largest first");
  auto* tensors = app.add_flag("--tensors", options->tensors_only, "Tensors only");
  app.add_flag("--objects", options->objects_only, "Objects only")->excludes(tensors);
  return [options] { return ls(*options); };
}

Command add_inspect(CLI::App& app) {
  auto options = std::make_shared<InspectOptions>();
  app.add_option("checkpoint", options->path, "Directory of the checkpoint")->required();
  app.add_option("key", options->key, "A key: its chunks, drawn and listed");
  app.add_flag("--json", options->json, "Print JSON, of everything");
  app.add_flag("--all", options->all, "List all files or shards, however many");
  return [options] { return inspect(*options); };
}

Command add_verify(CLI::App& app) {
  auto options = std::make_shared<VerifyOptions>();
  app.add_option("checkpoint", options->path, "Directory of the checkpoint")->required();
  app.add_option("--threads", options->threads, "Reading threads (0: as many as the machine has)")
      ->check(CLI::Range(0, 1024));
  app.add_flag("--json", options->json, "Print JSON");
  return [options] { return verify(*options); };
}

Command add_cat(CLI::App& app) {
  auto options = std::make_shared<CatOptions>();
  app.add_option("checkpoint", options->path, "Directory of the checkpoint")->required();
  app.add_option("key", options->key, "The key, as `tilestone ls` shows it")->required();
  app.add_option("--slice", options->slice, "Part of a tensor: \"0:4,:\", \"7\", \"::\" whole");
  auto* npy = app.add_option("--npy", options->npy, "Write the tensor to this .npy file");
  app.add_flag("--all", options->all, "Print every element, however many");
  app.add_flag("--json", options->json, "Print JSON, every element")->excludes(npy);
  return [options] { return cat(*options); };
}

Command add_gc(CLI::App& app) {
  auto options = std::make_shared<GcOptions>();
  app.add_option("location", options->path, "Directory that was saved to")->required();
  app.add_flag("--delete", options->remove, "Remove the files; without it they are only listed");
  app.add_flag("--json", options->json, "Print JSON");
  return [options] { return gc(*options); };
}

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
