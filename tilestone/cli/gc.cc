// tilestone gc: lists and removes the files that failed saves have left.
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

// Unpublished saves at the location that may still be published. Their files are not leftovers.
std::vector<UnpublishedSave> unfinished_at(const Location& location) {
  std::vector<UnpublishedSave> saves = find_unpublished(location);
  std::erase_if(saves, [](const UnpublishedSave& save) { return save.abandoned; });
  return saves;
}

void print_json(const std::vector<Leftover>& files, const std::vector<UnpublishedSave>& saves,
                bool removed) {
  nlohmann::ordered_json out = {{"removed", removed}, {"bytes", sum_of(files)}};
  out["files"] = nlohmann::ordered_json::array();
  for (const Leftover& file : files) {
    out["files"].push_back(
        {{"name", file.name}, {"size", file.size}, {"what", file.what}, {"why", file.why}});
  }
  out["unpublished"] = nlohmann::ordered_json::array();
  for (const UnpublishedSave& save : saves) {
    out["unpublished"].push_back({{"save_id", save.save_id}, {"text", save.text}});
  }
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

void print_text(const std::vector<Leftover>& files, const std::vector<UnpublishedSave>& saves,
                bool removed) {
  for (const UnpublishedSave& save : saves) {
    fmt::print("not a leftover: {}\n", printable(save.text));
  }
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
    fmt::print(stderr, "checking for {:.0f} seconds whether a rank is still working\n",
               abandoning.period);
    fmt::print(stderr, "abandoned the save {}\n", abandon(location, abandoning));
  }
  const std::vector<Leftover> files = options.remove ? remove_leftovers(location, options.force)
                                                     : find_leftovers(location, options.force);
  const std::vector<UnpublishedSave> saves = unfinished_at(location);
  if (options.json) {
    print_json(files, saves, options.remove);
  } else {
    print_text(files, saves, options.remove);
  }
  return kOk;
}

}  // namespace tilestone::cli
