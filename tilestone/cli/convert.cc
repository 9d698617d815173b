// tilestone convert: copies a checkpoint into another format, or parts of it, under other keys.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/stopping.h"

namespace tilestone::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string file_text(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  const bool is_folder = std::filesystem::is_directory(path);
  if (!file.is_open() || file.bad() || is_folder) {
    throw Error(ErrorCode::kIo, "cannot read the rules")
        .with_file(path)
        .with_errno(is_folder ? EISDIR : errno);
  }
  return text.str();
}

ConvertOptions options_of(const ConvertCommand& command) {
  ConvertOptions options;
  options.format = command.format;
  options.dialect = command.dialect;
  options.keys = command.keys;
  options.only = command.only;
  for (const std::string& rule : command.rename) options.rename.push_back(parse_rename_rule(rule));
  if (!command.rename_file.empty()) {
    for (RenameRule& rule : parse_rename_rules(file_text(command.rename_file))) {
      options.rename.push_back(std::move(rule));
    }
  }
  if (!command.cast.empty()) {
    options.cast = parse_dtype(command.cast);
    if (!options.cast) {
      throw Error(ErrorCode::kInvalidArgument, "unknown dtype \"" + command.cast + "\"")
          .with_hint("use torch's names, such as bfloat16");
    }
  }
  options.optimizer = command.optimizer;
  options.layout_file = command.layout;
  options.shard_bytes = command.shard_bytes;
  options.dry_run = command.dry_run;
  options.reading.follow_links = command.follow_links;
  return options;
}

Json json_of(const ConvertResult& result, bool written) {
  Json out = {{"written", written},          {"format", result.format},
              {"dialect", result.dialect},   {"bytes", result.bytes},
              {"left_out", result.left_out}, {"common_state", result.has_common},
              {"seconds", result.seconds}};
  out["keys"] = Json::array();
  for (const ConvertedKey& key : result.keys) {
    Json entry = {{"key", key.to}, {"from", key.from}};
    if (!key.object) {
      entry["dtype"] = to_string(key.dtype);
      entry["from_dtype"] = to_string(key.from_dtype);
      entry["shape"] = key.shape.span();
    }
    if (!key.file.empty()) entry["file"] = key.file;
    out["keys"].push_back(std::move(entry));
  }
  return out;
}

void print_keys(const ConvertResult& result) {
  Table table({"KEY", "FROM", "DTYPE", "SHAPE", "FILE"}, "lllll");
  for (const ConvertedKey& key : result.keys) {
    std::string dtype = key.object ? "object" : std::string(to_string(key.dtype));
    if (!key.object && key.dtype != key.from_dtype) {
      dtype += fmt::format(" (was {})", to_string(key.from_dtype));
    }
    table.add({printable(key.to), key.from == key.to ? "" : printable(key.from), dtype,
               key.object ? "" : shape_text(key.shape), key.file});
  }
  table.print();
}

void print_summary(const ConvertResult& result, const ConvertCommand& command) {
  uint64_t objects = 0;
  for (const ConvertedKey& key : result.keys) objects += key.object ? 1 : 0;
  const bool has_dialect = result.format == "torch_dist" || result.format == "zarr";
  const std::string format =
      has_dialect ? fmt::format("{}, dialect {}", result.format, result.dialect) : result.format;
  fmt::print("{} {} ({}): {}, {}", command.dry_run ? "would write" : "wrote", command.target,
             format, counted(result.keys.size() - objects, "tensor"), human_bytes(result.bytes));
  if (objects > 0) fmt::print("; {}", counted(objects, "object"));
  if (result.has_common) fmt::print("; the common state");
  if (result.left_out > 0) fmt::print("; left out {}", counted(result.left_out, "key"));
  if (!command.dry_run) {
    const double rate = static_cast<double>(result.bytes) / std::max(result.seconds, 1e-9);
    fmt::print("; {:.2f} s, {}/s", result.seconds, human_bytes(static_cast<uint64_t>(rate)));
  }
  fmt::print("\n");
}

}  // namespace

int convert(const ConvertCommand& command) {
  ConvertOptions options = options_of(command);
  options.progress = command.json ? nullptr : progress_line();
  const Location source = location_of(command.source, command.follow_links);
  ConvertResult result;
  end_in_order([&](std::shared_ptr<const Interrupt> interrupt) {
    options.interrupt = std::move(interrupt);
    result = tilestone::convert(source, Location(command.target), options);
  });
  if (command.json) {
    print_json(json_of(result, !command.dry_run));
    return kOk;
  }
  if (command.dry_run) print_keys(result);
  print_summary(result, command);
  return kOk;
}

}  // namespace tilestone::cli
