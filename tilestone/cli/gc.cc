// tilestone gc: what failed saves have left, and its removal.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"

namespace tilestone::cli {
namespace {

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

}  // namespace

int gc(const GcOptions& options) {
  const Location location = location_of(options.path, options.follow_links);
  if (options.abandon) {
    AbandonOptions abandoning;
    abandoning.save_id = options.save_id;
    fmt::print(stderr, "watching for {:.0f} seconds whether a rank still works\n",
               abandoning.period);
    fmt::print(stderr, "abandoned the save {}\n", abandon(location, abandoning));
  }
  const std::vector<Leftover> files = options.remove
                                          ? remove_leftovers(location, nullptr, options.force)
                                          : find_leftovers(location, nullptr, options.force);
  if (options.json) {
    print_json(files, options.remove);
  } else {
    print_text(files, options.remove);
  }
  return kOk;
}

}  // namespace tilestone::cli
