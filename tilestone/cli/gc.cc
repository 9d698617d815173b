// tilestone gc: lists and removes the files that failed saves have left.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/runs.h"

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

struct Cleaned {
  std::vector<Leftover> files;
  std::vector<UnpublishedSave> saves;
};

// The steps of a line. What a run continues from is protected: the line that was saved last, with
// the steps of an older line that it continues.
std::vector<Leftover> clean_line(const RunDirectory& run, const GcOptions& options) {
  const std::vector<StepInfo> steps = run.steps();
  const Line followed = followed_line(steps);
  if (!options.force && !followed.empty() && run_name(followed.front()->lineage) == options.line) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a run in {} continues from step {} of the line {}",
                            run.location().describe(), followed.front()->step, options.line))
        .with_hint("--force removes the line all the same");
  }
  std::set<std::string> lines;
  std::vector<Leftover> found;
  for (const StepInfo& step : steps) {
    const std::string line = run_name(step.lineage);
    if (!is_checkpoint(step)) continue;
    lines.insert(line);
    if (line != options.line || (!options.force && is_on(followed, step))) continue;
    if (options.remove && run.remove(step) != Removed::kNow) continue;
    found.push_back({step.name, step.bytes, "step of the line " + line, "--line names its line"});
  }
  if (lines.contains(options.line)) return found;
  std::string all;
  for (const std::string& line : lines) all += " " + line;
  throw Error(ErrorCode::kNotFound,
              fmt::format("{} has no step of the line {}", run.location().describe(), options.line))
      .with_hint("its lines are" + all);
}

Cleaned clean_run(const RunDirectory& run, const GcOptions& options) {
  Cleaned cleaned;
  if (!options.line.empty()) {
    cleaned.files = clean_line(run, options);
    return cleaned;
  }
  cleaned.files =
      options.remove ? run.remove_leftovers(options.force) : run.find_leftovers(options.force);
  for (const StepInfo& step : run.list()) {
    for (UnpublishedSave& save : unfinished_at(run.at(step.name))) {
      cleaned.saves.push_back(std::move(save));
    }
  }
  return cleaned;
}

Cleaned clean(const Location& location, const GcOptions& options) {
  Cleaned cleaned;
  cleaned.files = options.remove ? remove_leftovers(location, options.force)
                                 : find_leftovers(location, options.force);
  cleaned.saves = unfinished_at(location);
  return cleaned;
}

nlohmann::ordered_json json_of(const Cleaned& cleaned, bool removed) {
  nlohmann::ordered_json out = {{"removed", removed}, {"bytes", sum_of(cleaned.files)}};
  out["files"] = nlohmann::ordered_json::array();
  for (const Leftover& file : cleaned.files) {
    out["files"].push_back(
        {{"name", file.name}, {"size", file.size}, {"what", file.what}, {"why", file.why}});
  }
  out["unpublished"] = nlohmann::ordered_json::array();
  for (const UnpublishedSave& save : cleaned.saves) {
    out["unpublished"].push_back({{"save_id", save.save_id}, {"text", save.text}});
  }
  return out;
}

// What a leftover is, without the save's id, which its name has.
std::string kind_of(const Leftover& file) {
  return printable(file.what.substr(0, file.what.find(" of the save ")));
}

// The reasons, which are long, stand below the table, each once.
void print_table(const std::vector<Leftover>& files, bool wide) {
  std::vector<std::string> reasons;
  Table table({"FILE", "SIZE", "WHAT", "WHY"}, "lrlr");
  for (const Leftover& file : files) {
    auto reason = std::find(reasons.begin(), reasons.end(), file.why);
    if (reason == reasons.end()) reason = reasons.insert(reason, file.why);
    table.add({printable(file.name), human_bytes(file.size), kind_of(file),
               std::to_string(reason - reasons.begin() + 1)});
  }
  table.print(wide);
  for (size_t i = 0; i < reasons.size(); ++i) fmt::print("{}: {}\n", i + 1, printable(reasons[i]));
}

void print_text(const Cleaned& cleaned, const GcOptions& options) {
  const std::vector<Leftover>& files = cleaned.files;
  for (const UnpublishedSave& save : cleaned.saves) {
    fmt::print("not a leftover: {}\n", printable(save.text));
  }
  if (files.empty()) {
    fmt::print("no leftovers\n");
    return;
  }
  print_table(files, options.wide);
  fmt::print("\n{}, {}: {}\n", counted(files.size(), "leftover"), human_bytes(sum_of(files)),
             options.remove ? "removed" : "not removed; --delete removes them");
}

}  // namespace

int gc(const GcOptions& options) {
  if (options.abandon) {
    if (!options.at.is_one_checkpoint()) {
      throw Error(ErrorCode::kInvalidArgument, "--abandon is for one location, not for a run");
    }
    AbandonOptions abandoning;
    abandoning.save_id = options.save_id;
    fmt::print(stderr, "checking for {:.0f} seconds whether a rank is still working\n",
               abandoning.period);
    fmt::print(stderr, "abandoned the save {}\n",
               abandon(location_of(options.at.paths.front(), options.at.follow_links), abandoning));
  }
  const auto is_run = [&](const std::string& path) { return options.at.is_run(path); };
  if (!options.line.empty() &&
      !std::all_of(options.at.paths.begin(), options.at.paths.end(), is_run)) {
    throw Error(ErrorCode::kInvalidArgument, "--line is for the directory of a run");
  }
  const std::vector<std::string>& paths = options.at.paths;
  return for_each_path(paths, paths.size() == 1, options.json, [&](const std::string& path) {
    const Cleaned cleaned = options.at.is_run(path)
                                ? clean_run(options.at.run(path), options)
                                : clean(location_of(path, options.at.follow_links), options);
    if (!options.json) print_text(cleaned, options);
    return Said{kOk, json_of(cleaned, options.remove)};
  });
}

}  // namespace tilestone::cli
