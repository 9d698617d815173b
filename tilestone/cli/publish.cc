// tilestone publish: publishes a save without a communicator, after all ranks have written.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"

namespace tilestone::cli {
namespace {

std::string missing_text(const UnpublishedSave& save) {
  std::string text;
  for (const int rank : save.missing) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  const bool more = save.missing_count > save.missing.size();
  return text.empty() && !more ? "none" : text + (more ? ", ..." : "");
}

nlohmann::ordered_json json_of(const std::vector<UnpublishedSave>& saves) {
  auto out = nlohmann::ordered_json::array();
  for (const UnpublishedSave& save : saves) {
    out.push_back({{"save_id", save.save_id},
                   {"world_size", save.world_size},
                   {"format", save.format},
                   {"dialect", save.dialect},
                   {"missing_count", save.missing_count},
                   {"missing", save.missing},
                   {"failure", save.failure},
                   {"abandoned", save.abandoned},
                   {"text", save.text}});
  }
  return out;
}

void print_text(const std::vector<UnpublishedSave>& saves) {
  if (saves.empty()) {
    fmt::print("no unpublished saves\n");
    return;
  }
  Table table({"SAVE", "RANKS", "MISSING", "FAILURE"}, "lrll");
  for (const UnpublishedSave& save : saves) {
    table.add({save.save_id, std::to_string(save.world_size),
               save.abandoned ? "abandoned" : missing_text(save), printable(save.failure)});
  }
  table.print();
  for (const UnpublishedSave& save : saves) fmt::print("\n{}\n", printable(save.text));
}

// A misspelt path must not look like a location where everything is published.
void expect_files(const Location& location) {
  if (!location.has_files()) throw Error(ErrorCode::kNotFound, "no file at " + location.describe());
}

}  // namespace

int publish(const PublishCommand& command) {
  const Location location = location_of(command.path, command.follow_links);
  if (command.list) {
    const auto saves = find_unpublished(location);
    if (saves.empty()) expect_files(location);
    command.json ? print_json(json_of(saves)) : print_text(saves);
    return kOk;
  }
  PublishOptions options;
  options.save_id = command.save_id;
  fmt::print("published the save {}\n", tilestone::publish(location, options));
  return kOk;
}

}  // namespace tilestone::cli
