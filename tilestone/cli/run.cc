#include "tilestone/cli/run.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/completion.h"
#include "tilestone/cli/output.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {
namespace {

using Command = std::function<int()>;

constexpr const char* kExitCodes =
    "Exit codes:\n"
    "  0    ok\n"
    "  1    damaged, or different (diff)\n"
    "  2    usage error, or a key or pattern that is not in the checkpoint\n"
    "  3    no checkpoint, one that is in the way, a save under way, or I/O error\n"
    "  4    unsafe content\n"
    "  130  interrupted"
    "\n\nNO_COLOR=1 in the environment: no colours on terminals.";

constexpr const char* kFollowLinks =
    "Read files through any symbolic link; use it only if you trust the links";

// The options that several commands have.
template <typename Options>
void add_common(CLI::App& app, Options& options) {
  if constexpr (requires { options.at; }) {
    app.add_flag("--follow-links", options.at.follow_links, kFollowLinks);
    app.add_option("--name", options.at.name,
                   "Names of the steps' folders in a run's directory, if they are unusual")
        ->capture_default_str();
  } else {
    app.add_flag("--follow-links", options.follow_links, kFollowLinks);
  }
  if constexpr (requires { options.json; }) app.add_flag("--json", options.json, "Print JSON");
  if constexpr (requires { options.wide; }) {
    app.add_flag("--wide", options.wide, "Don't shorten names to the terminal's width");
  }
}

void declare_ls(CLI::App& app, LsOptions& options) {
  app.add_option(
         "path", options.at.paths,
         "Directories of checkpoints or of runs; any other word is a pattern (*, ?, [...]) of "
         "the keys to list")
      ->required();
  auto* tree = app.add_flag("--tree", options.tree, "Show the keys as a tree");
  app.add_option("--depth", options.depth, "Levels of the tree")
      ->needs(tree)
      ->check(CLI::Range(1, 1000));
}

void declare_inspect(CLI::App& app, InspectOptions& options) {
  app.add_option("checkpoint", options.path, "Directory of the checkpoint")->required();
  app.add_option("key", options.key, "Show how the chunks of this key are placed and stored");
  app.add_flag("--all", options.all, "List all files or shards, even if there are many");
}

void declare_verify(CLI::App& app, VerifyOptions& options) {
  app.add_option("checkpoint", options.at.paths, "Directories of checkpoints, or of runs")
      ->required();
  app.add_flag("--all", options.all, "List each item that a truncated file lacks");
  app.add_flag("--repair", options.repair,
               "First rewrite what is damaged from intact copies in other files");
}

void declare_cat(CLI::App& app, CatOptions& options) {
  app.add_option("checkpoint", options.path, "Directory of the checkpoint")->required();
  auto* key = app.add_option("key", options.key,
                             "The key, as `tilestone ls` shows it, or the beginning of keys");
  auto* common = app.add_flag("--common", options.common,
                              "Print the common state of a checkpoint in Megatron-Core's dialect");
  common->excludes(key);
  // An empty shell variable must not count as an option that was not given.
  const auto not_empty = [](const std::string& given) {
    return std::string(given.empty() ? "it is empty" : "");
  };
  app.add_option("--slice", options.slice,
                 "Print only this part of a tensor: \"7\", or \"0:4,:\" (\":\" is a whole dim)")
      ->check(not_empty);
  auto* npy = app.add_option("--npy", options.npy, "Write the tensor to this .npy file");
  npy->check(not_empty);
  app.add_flag("--all", options.all, "Print every element, even if there are many");
  app.get_option("--json")->excludes(npy);
  app.final_callback([key, common] {
    if (key->count() + common->count() == 0) throw CLI::RequiredError("key or --common");
  });
}

void declare_convert(CLI::App& app, ConvertCommand& command) {
  app.add_option("source", command.source, "Checkpoint, folder of safetensors files, or one file")
      ->required();
  app.add_option(
         "target", command.target,
         "Directory of the new checkpoint, or a file (.safetensors, .pt, .pth); it must not exist")
      ->required();
  app.add_option(
      "--to", command.format,
      "Format: safetensors, torch_checkpointing, torch_dist, zarr or torch_save. Default: "
      "torch_save for a target "
      "named .pt or .pth; safetensors for one named .safetensors; else safetensors, or torch_dist "
      "if the source is not a checkpoint of torch_dist or zarr");
  app.add_option("--dialect", command.dialect, "pytorch or megatron. Default: the source's");
  app.add_option("--keys", command.keys,
                 "Convert only keys of the source that match one of these patterns (*, ?, [...])");
  app.add_option("--only", command.only,
                 "Convert only this part of the tree, which becomes the whole: `--only model`");
  app.add_option("--rename", command.rename,
                 "REGEX=NAME: in a key, replace what REGEX finds by NAME (\\1: a group). The first "
                 "rule that finds something counts; a key that becomes empty is left out");
  app.add_option("--rename-file", command.rename_file, "A file of such rules, one in each line");
  app.add_option("--cast", command.cast,
                 "Convert tensors of float16, bfloat16, float32 and float64 to this dtype");
  app.add_option("--optimizer", command.optimizer,
                 "fully_reshardable: store the states of Megatron-Core's distributed optimizer by "
                 "parameter instead of in buckets, so that they load into any layout");
  app.add_option("--layout", command.layout,
                 "File that says where each parameter is in the buckets; implies --optimizer. "
                 "Default: the layout that the checkpoint holds");
  app.add_option("--shard-size", command.shard_bytes,
                 "Bytes of tensors in one safetensors file: 5GB, 500MiB")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 50));
  app.add_flag("--dry-run", command.dry_run, "Check and list everything, but write nothing");
}

void declare_diff(CLI::App& app, DiffCommand& command) {
  app.add_option("a", command.a, "A checkpoint, a folder of safetensors files, or one file")
      ->required();
  app.add_option("b", command.b, "Another one, of any format and layout")->required();
  app.add_option("--keys", command.keys,
                 "Compare only keys of A or B, before --rename, that match one of these patterns");
  app.add_option("--rename", command.rename,
                 "REGEX=NAME: rename A's keys before they are compared, as for convert");
  app.add_option("--atol", command.atol, "Values that differ by at most this are equal");
}

void declare_delta(CLI::App& app, DeltaCommand& command) {
  app.add_option("a", command.a, "The base: a checkpoint of any format")->required();
  app.add_option("b", command.b, "The new version, likewise")->required();
  app.add_option("path", command.path, "The file to write, NAME.safetensors; it must not exist")
      ->required();
}

void declare_du(CLI::App& app, DuOptions& options) {
  app.add_option("checkpoint", options.path, "Directory of the checkpoint")->required();
  app.add_option("pattern", options.patterns,
                 "Count only keys that match one of these patterns (*, ?, [...])");
  app.add_option("--by", options.by, "prefix (of the keys), rank or file")
      ->check(CLI::IsMember({"prefix", "rank", "file"}));
  app.add_option("--depth", options.depth, "Parts of the keys that are a prefix (default: 2)")
      ->check(CLI::Range(1, 1000));
  app.add_flag("--by-name", options.by_name, "Order by name; otherwise the largest first");
}

void declare_layout(CLI::App& app, LayoutOptions& options) {
  app.add_option("checkpoint", options.path, "Directory of the checkpoint")->required();
  app.add_option("-o,--output", options.output,
                 "The page (default: layout.html; -: standard output)");
}

void declare_gc(CLI::App& app, GcOptions& options) {
  app.add_option("location", options.at.paths, "Directories that were saved to, or of runs")
      ->required();
  app.add_flag("--delete", options.remove, "Remove the files; without this they are only listed");
  app.add_flag(
      "--force", options.force,
      "Include the files of a checkpoint that has lost only its hidden files; with --line, "
      "permit the line that the run continues from");
  auto* abandon = app.add_flag("--abandon", options.abandon,
                               "First end an unfinished save without a communicator, if nothing of "
                               "it changes for a minute");
  app.add_option("--save-id", options.save_id, "The save to abandon, if there are several")
      ->needs(abandon);
  app.add_option("--line", options.line,
                 "Of a run: list or remove all steps of this line (ls shows the lines)")
      ->excludes(abandon);
}

void declare_publish(CLI::App& app, PublishCommand& options) {
  app.add_option("location", options.path, "Directory that was saved to")->required();
  auto* id =
      app.add_option("--save-id", options.save_id, "The save to publish, if there are several");
  auto* list =
      app.add_flag("--list", options.list, "Only list the unpublished saves, with reasons");
  list->excludes(id);
  app.get_option("--json")->needs(list);
}

// Ordinary options and flags of each command, for the shells.
Command add_completion(CLI::App& app) {
  auto shell = std::make_shared<std::string>();
  app.add_option("shell", *shell, "bash or zsh")->required()->check(CLI::IsMember({"bash", "zsh"}));
  return [shell, &app] {
    std::vector<CommandWords> commands;
    for (const CLI::App* sub :
         app.get_parent()->get_subcommands([](const CLI::App*) { return true; })) {
      CommandWords& words = commands.emplace_back();
      words.name = sub->get_name();
      for (const CLI::Option* option : sub->get_options()) {
        for (const std::string& name : option->get_lnames()) words.options.push_back("--" + name);
      }
    }
    return completion(*shell, commands);
  };
}

[[noreturn]] void fail_output(int error) {
  throw Error(ErrorCode::kIo, "cannot write to standard output").with_errno(error);
}

// Flushes standard output, because a full disk may be reported only when the last buffer is
// written.
int with_output_written(const Command& command) {
  try {
    const int code = command();
    if (std::fflush(stdout) != 0) fail_output(errno);
    if (std::ferror(stdout) != 0) fail_output(EIO);
    return code;
  } catch (const std::system_error& error) {  // thrown by fmt
    fail_output(error.code().value());
  }
}

int failed(const Error& error) {
  // The reader has closed the pipe (`| head`): there is nobody to report to.
  if (error.sys_errno() != EPIPE) {
    std::fflush(stdout);
    const std::string name = coloured("tilestone:", Colour::kBad, stderr);
    std::fputs((name + " " + error.what() + "\n").c_str(), stderr);
  }
  return exit_code(error.code());
}

// CLI11 has its own exit codes. Help and version are 0; everything else is a usage error.
int parse_failed(const CLI::App& app, const CLI::ParseError& error) {
  try {
    return with_output_written([&] {
      const int code = app.exit(error) == 0 ? kOk : kUsage;
      const std::string_view what = error.what();  // "...: --dash"
      const bool is_extra = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError);
      const bool has_dash = is_extra && what.find(": -") != what.npos;
      if (has_dash) std::fputs("A key or path may begin with a dash after `--`.\n", stderr);
      return code;
    });
  } catch (const Error& unwritten) {
    return failed(unwritten);
  }
}

}  // namespace

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnsupported:
      return kUsage;
    case ErrorCode::kMismatch:
    case ErrorCode::kCoverage:
    case ErrorCode::kCorrupt:
      return kDamaged;
    case ErrorCode::kUnsafe:
      return kUnsafe;
    // These errors say nothing about the checkpoint.
    case ErrorCode::kNotFound:
    case ErrorCode::kAlreadyExists:
    case ErrorCode::kIo:
    case ErrorCode::kTimeout:
    case ErrorCode::kRankFailed:
    case ErrorCode::kInternal:
    case ErrorCode::kInterrupted:
      break;
  }
  return kIoFailed;
}

int run(int argc, const char* const* argv) {
  CLI::App app("Tilestone: shows what is in a checkpoint and whether it is intact.", "tilestone");
  app.set_version_flag("--version", std::string("tilestone ") + kVersion);
  app.require_subcommand(1);
  app.footer(kExitCodes);
  std::vector<std::pair<CLI::App*, Command>> commands;
  const auto add_named = [&](const char* name, const char* what) {
    CLI::App* sub = app.add_subcommand(name, what);
    sub->footer(kExitCodes);
    return sub;
  };
  const auto add = [&]<typename Options>(const char* name, const char* what,
                                         void (*declare)(CLI::App&, Options&),
                                         int (*work)(const Options&)) {
    CLI::App* sub = add_named(name, what);
    const auto options = std::make_shared<Options>();
    add_common(*sub, *options);
    declare(*sub, *options);
    commands.emplace_back(sub, [options, work] { return work(*options); });
  };
  add("ls", "List keys with dtype, shape, shards and bytes, or the steps of a run", declare_ls, ls);
  add("inspect", "Show a checkpoint's writer and files, or how a key is sharded", declare_inspect,
      inspect);
  add("verify", "Read every byte and check every checksum", declare_verify, verify);
  add("cat", "Print the values of a tensor, a slice of one, or an object", declare_cat, cat);
  add("convert", "Copy a checkpoint into another format, or parts of it, under other keys",
      declare_convert, convert);
  add("diff", "Compare two checkpoints: keys, shapes, dtypes and values", declare_diff, diff);
  add("delta", "Write what has changed in the tensors from one checkpoint to another",
      declare_delta, delta);
  add("du", "Show the bytes by prefix of the keys, by rank or by file", declare_du, du);
  add("layout", "Draw which rank and which file holds what, as a page of HTML", declare_layout,
      layout);
  add("publish", "Publish a save without a communicator, after all ranks have written",
      declare_publish, publish);
  add("gc", "List or remove the files that failed saves have left", declare_gc, gc);
  CLI::App* shells =
      add_named("completion", "Print a script that completes commands and options: bash, zsh");
  commands.emplace_back(shells, add_completion(*shells));
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError& error) {
    const std::vector<std::string> unknown = app.remaining();
    const bool is_command = unknown.empty() || !app.get_subcommands().empty();
    return is_command ? parse_failed(app, error) : parse_failed(app, CLI::ExtrasError(unknown));
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
