#include "tilestone/cli/run.h"

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "tilestone/cli/commands.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {
namespace {

using Command = std::function<int()>;

template <typename Options>
void add_path(CLI::App& app, Options& options, const char* name = "checkpoint",
              const char* what = "Directory of the checkpoint") {
  app.add_option(name, options.path, what)->required();
  app.add_flag("--follow-links", options.follow_links,
               "Read files through any symbolic link; only where you trust who made them");
}

Command add_ls(CLI::App& app) {
  auto options = std::make_shared<LsOptions>();
  add_path(app, *options);
  app.add_option("pattern", options->patterns, "Only keys that match one of these (*, ?, [...])");
  app.add_flag("--json", options->json, "Print JSON");
  app.add_flag("--by-size", options->by_size, "Largest first");
  auto* tensors = app.add_flag("--tensors", options->tensors_only, "Tensors only");
  app.add_flag("--objects", options->objects_only, "Objects only")->excludes(tensors);
  return [options] { return ls(*options); };
}

Command add_inspect(CLI::App& app) {
  auto options = std::make_shared<InspectOptions>();
  add_path(app, *options);
  app.add_option("key", options->key, "A key: its chunks, drawn and listed");
  app.add_flag("--json", options->json, "Print JSON, of everything");
  app.add_flag("--all", options->all, "List all files or shards, however many");
  return [options] { return inspect(*options); };
}

Command add_verify(CLI::App& app) {
  auto options = std::make_shared<VerifyOptions>();
  add_path(app, *options);
  app.add_option("--threads", options->threads, "Reading threads (0: as many as the machine has)")
      ->check(CLI::Range(0, 1024));
  app.add_flag("--json", options->json, "Print JSON");
  app.add_flag("--repair", options->repair,
               "Write damaged shards anew from intact copies in other files");
  return [options] { return verify(*options); };
}

Command add_cat(CLI::App& app) {
  auto options = std::make_shared<CatOptions>();
  add_path(app, *options);
  auto* key = app.add_option("key", options->key, "The key, as `tilestone ls` shows it");
  auto* common = app.add_flag("--common", options->common,
                              "The common state of a checkpoint in Megatron-Core's dialect");
  common->excludes(key);
  app.add_option("--slice", options->slice, "Part of a tensor: \"0:4,:\", \"7\", \"::\" whole");
  auto* npy = app.add_option("--npy", options->npy, "Write the tensor to this .npy file");
  app.add_flag("--all", options->all, "Print every element, however many");
  app.add_flag("--json", options->json, "Print JSON, every element")->excludes(npy);
  app.final_callback([key, common] {
    if (key->count() + common->count() == 0) throw CLI::RequiredError("key or --common");
  });
  return [options] { return cat(*options); };
}

Command add_gc(CLI::App& app) {
  auto options = std::make_shared<GcOptions>();
  add_path(app, *options, "location", "Directory that was saved to");
  app.add_flag("--delete", options->remove, "Remove the files; without it they are only listed");
  app.add_flag("--force", options->force,
               "Also the files of a checkpoint that has only lost its hidden files");
  auto* abandon = app.add_flag("--abandon", options->abandon,
                               "First end a save without a communicator that nobody completes: it "
                               "is watched for a minute, and must not change");
  app.add_option("--save-id", options->save_id, "Which one, where there are several")
      ->needs(abandon);
  app.add_flag("--json", options->json, "Print JSON");
  return [options] { return gc(*options); };
}

Command add_publish(CLI::App& app) {
  auto options = std::make_shared<PublishCommand>();
  add_path(app, *options, "location", "Directory that was saved to");
  auto* id = app.add_option("--save-id", options->save_id, "Which one, where there are several");
  auto* list = app.add_flag("--list", options->list, "Only say what is unpublished, and why");
  list->excludes(id);
  app.add_flag("--json", options->json, "Print JSON")->needs(list);
  return [options] { return publish(*options); };
}

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kAlreadyExists:
    case ErrorCode::kUnsupported:
      return kUsage;
    case ErrorCode::kMismatch:
    case ErrorCode::kCoverage:
    case ErrorCode::kCorrupt:
      return kDamaged;
    case ErrorCode::kUnsafe:
      return kUnsafe;
    // These say nothing of the checkpoint.
    case ErrorCode::kNotFound:
    case ErrorCode::kIo:
    case ErrorCode::kTimeout:
    case ErrorCode::kRankFailed:
    case ErrorCode::kInternal:
    case ErrorCode::kInterrupted:
      break;
  }
  return kIoFailed;
}

[[noreturn]] void fail_output(int error) {
  throw Error(ErrorCode::kIo, "cannot write to standard output").with_errno(error);
}

// A disk that is full may show only when the last buffer is written.
int with_output_written(const Command& command) {
  try {
    const int code = command();
    if (std::fflush(stdout) != 0) fail_output(errno);
    if (std::ferror(stdout) != 0) fail_output(EIO);
    return code;
  } catch (const std::system_error& error) {  // of fmt
    fail_output(error.code().value());
  }
}

int failed(const Error& error) {
  // Nobody reads any more (`| head`): that is no news to anybody.
  if (error.sys_errno() != EPIPE) {
    std::fflush(stdout);
    std::fputs(("tilestone: " + std::string(error.what()) + "\n").c_str(), stderr);
  }
  return exit_code(error.code());
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
      "Exit codes: 0 ok, 1 damaged or different, 2 usage (a key that the checkpoint lacks too), 3 "
      "no "
      "checkpoint there or I/O error, 4 unsafe content.");
  std::vector<std::pair<CLI::App*, Command>> commands;
  const auto add = [&](const char* name, const char* what, Command (*declare)(CLI::App&)) {
    CLI::App* sub = app.add_subcommand(name, what);
    commands.emplace_back(sub, declare(*sub));
  };
  add("ls", "List keys with dtype, shape, shards and bytes", add_ls);
  add("inspect", "Where a checkpoint came from, its files, and how a key is sharded", add_inspect);
  add("verify", "Read every byte and check every checksum", add_verify);
  add("cat", "Print the values of a tensor, a slice of one, or an object", add_cat);
  add("publish", "Complete a save without a communicator of which all ranks have written",
      add_publish);
  add("gc", "List, or remove, the files that failed saves have left", add_gc);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return parse_failed(app, error);
  }
  try {
    for (const auto& [sub, command] : commands) {
      if (sub->parsed()) return with_output_written(command);
    }
    return kUsage;
  } catch (...) {
    return failed(current_error());
  }
}

}  // namespace tilestone::cli
