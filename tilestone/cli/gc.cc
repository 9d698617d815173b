// tilestone gc: what failed saves have left, and its removal.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"

namespace tilestone::cli {
namespace {

struct GcOptions {
  std::string path;
  bool remove = false;
  bool json = false;
};

uint64_t sum_of(const std::vector<Leftover>& files) {
  uint64_t bytes = 0;
  for (const Leftover& file : files) bytes += file.size;
  return bytes;
}

void print_json(const std::vector<Leftover>& files, bool removed) {
  nlohmann::ordered_json out = {{"removed", removed}, {"bytes", sum_of(files)}};
  out["files"] = nlohmann::ordered_json::array();
  for (const Leftover& file : files) {
    out["files"].push_back(
        {{"name", file.name}, {"size", file.size}, {"what", file.what}, {"why", file.why}});
  }
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

void print_text(const std::vector<Leftover>& files, bool removed) {
  if (files.empty()) {
    fmt::print("no leftovers\n");
    return;
  }
  Table table({"FILE", "SIZE", "WHAT", "WHY"}, "lrll");
  for (const Leftover& file : files) {
    table.add(
        {printable(file.name), human_bytes(file.size), printable(file.what), printable(file.why)});
  }
  table.print();
  fmt::print("\n{}, {}: {}\n", counted(files.size(), "leftover"), human_bytes(sum_of(files)),
             removed ? "removed" : "not removed; --delete removes them");
}

int gc(const GcOptions& options) {
  const std::vector<Leftover> files =
      options.remove ? remove_leftovers(options.path) : find_leftovers(options.path);
  if (options.json) {
    print_json(files, options.remove);
  } else {
    print_text(files, options.remove);
  }
  return kOk;
}

}  // namespace

Command add_gc(CLI::App& app) {
  auto options = std::make_shared<GcOptions>();
  app.add_option("location", options->path, "Directory that was saved to")->required();
  app.add_flag("--delete", options->remove, "Remove the files; without it they are only listed");
  app.add_flag("--json", options->json, "Print JSON");
  return [options] { return gc(*options); };
}

}  // namespace tilestone::cli
