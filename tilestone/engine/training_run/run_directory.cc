#include "tilestone/engine/training_run/checkpoint_manager.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/number_text.h"
#include "tilestone/base/or_log.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/look_around_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/training_run/hints_internal.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/index.h"
#include "tilestone/format/manifest.h"

namespace tilestone {
namespace {

constexpr std::string_view kMetricPrefix = "metric.";

// How much of the run is lost if it continues from `found` and not from the newest step.
std::string lost_text(const std::vector<StepInfo>& damaged, const std::optional<StepInfo>& found) {
  std::string text;
  for (const StepInfo& each : damaged) {
    text += fmt::format("{}{} is damaged ({})", text.empty() ? "" : "; ", each.name, each.problem);
  }
  if (!found) return text + "; there is no older checkpoint that it continues";
  const uint64_t newest = std::max(damaged.front().step, found->step);
  return text + fmt::format("; the run continues from {}, so what it did in {} is lost",
                            found->name, counted(newest - found->step, "step"));
}

// The error about the files of a run's newest step, which does not name the step itself.
Error about_newest(const Error& error, const std::string& name) {
  const char* const state = error.code() == ErrorCode::kIo ? "can't be read" : "is damaged";
  return error.with_message(fmt::format("{} {}: {}", name, state, error.message()))
      .with_advice({"restore with fallback continues from the newest intact step"});
}

// A directory without steps is taken for that of a run that begins. It may be a wrong one.
void warn_of_other_checkpoints(const Location& location) {
  Storage& storage = location.storage();
  if (engine::may_be_checkpoint(storage)) {
    return log(LogLevel::kWarning,
               fmt::format("{} is a checkpoint itself, and has no folder of a step: the run's "
                           "directory is the one that holds the steps",
                           location.describe()));
  }
  const std::vector<std::string> others = engine::checkpoints_below(storage);
  if (others.empty()) return;
  log(LogLevel::kWarning,
      fmt::format("{} has no folder of a step, but {} like {}: do the steps have another name?",
                  location.describe(), counted(others.size(), "checkpoint"), others.back()));
}

// Whether the name, which is not a directory's, is that of a link to one. It may lead out of the
// run's directory. A FIFO, a link to a file and a loop of links are none.
bool is_linked_folder(const Location& location) {
  try {
    location.storage().list_directories();
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound) return false;
    return error.sys_errno() != ENOTDIR && error.sys_errno() != ELOOP;
  }
}

bool has_folder(const RunDirectory& run, const std::string& name) {
  const std::vector<StepInfo> listed = run.list();
  return std::any_of(listed.begin(), listed.end(),
                     [&](const StepInfo& each) { return each.name == name; });
}

// Of several folders of a step, which list() sorts, the one that counts.
std::optional<StepInfo> last_of(const std::vector<StepInfo>& listed, uint64_t step) {
  const auto found = std::find_if(listed.rbegin(), listed.rend(),
                                  [&](const StepInfo& each) { return each.step == step; });
  return found == listed.rend() ? std::nullopt : std::optional(*found);
}

// Some stores go on listing a prefix whose objects are gone: that is no step.
std::vector<StepInfo> looked_at(const RunDirectory& run, const std::vector<StepInfo>& listed) {
  const bool has_folders = run.location().storage().facts().has_folders;
  std::vector<StepInfo> steps;
  for (const StepInfo& each : listed) {
    engine::Look look = engine::look_or_believe(run, each);
    if (has_folders || !look.is_empty) steps.push_back(std::move(look.info));
  }
  return steps;
}

using Names = std::vector<std::string>;

bool is_among(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

namespace engine {

void follow(const RunDirectory& run, std::vector<StepInfo> steps, const Names& damaged,
            const LookAt& look, const std::function<bool(const Look&)>& take) {
  while (const StepInfo* tip = tip_of(steps)) {
    const auto at = steps.begin() + (tip - steps.data());
    bool is_damaged = is_among(damaged, at->name);
    if (!is_damaged) {
      Look seen = look(*at);
      if (seen.info.state == StepState::kDurable && seen.info.lineage != at->lineage) {
        *at = std::move(seen.info);  // a killed save had left a manifest beside the checkpoint's
        continue;
      }
      const bool is_gone =  // removed meanwhile
          seen.info.state != StepState::kDurable && !has_folder(run, at->name);
      if (!is_gone && take(seen)) return;
      is_damaged = seen.error && !is_gone;
    }
    if (is_damaged) {
      std::vector<StepInfo> rest;
      const Line line = line_of(steps, *at);
      for (size_t i = 1; i < line.size(); ++i) rest.push_back(*line[i]);
      steps = std::move(rest);
    } else {
      steps.erase(at);
    }
  }
}

}  // namespace engine

std::string_view to_string(StepState state) {
  static constexpr std::string_view kNames[] = {"durable", "unfinished", "damaged", "foreign"};
  return kNames[static_cast<size_t>(state)];
}

std::map<std::string, std::string> attributes_of(const std::map<std::string, double>& metrics) {
  std::map<std::string, std::string> attributes;
  for (const auto& [name, value] : metrics) {
    if (name.empty()) {
      throw Error(ErrorCode::kInvalidArgument, "the name of a metric is empty");
    }
    attributes.emplace(std::string(kMetricPrefix) + name, fmt::format("{}", value));
  }
  return attributes;
}

std::map<std::string, double> metrics_of(const std::map<std::string, std::string>& attributes) {
  std::map<std::string, double> metrics;
  for (const auto& [name, text] : attributes) {
    if (!name.starts_with(kMetricPrefix)) continue;
    const auto value = number_in<double>(text);
    if (value) metrics.emplace(name.substr(kMetricPrefix.size()), *value);
  }
  return metrics;
}

Inventory inventory_of(const Location& location) {
  engine::Found found = engine::find_checkpoint(location.shared(), nullptr);
  const engine::Opened opened = engine::open_description(std::move(found.description), nullptr);
  std::vector<std::vector<std::string>> files;
  if (opened.manifest) {
    for (const Receipt& receipt : opened.manifest->receipts) {
      files.emplace_back();
      for (const ReceiptFile& file : receipt.files) files.back().push_back(file.name);
    }
  }
  Inventory inventory = inventory_of(opened.metadata, files);
  if (opened.dialect->common_object().empty()) return inventory;
  or_log(LogLevel::kWarning, "the common state is not compared", [&] {
    if (const auto common = Checkpoint::open(location).common()) add_common(inventory, *common);
  });
  return inventory;
}

RunDirectory::RunDirectory(Location location, const std::string& pattern)
    : location_(std::move(location)), names_(pattern) {}

Location RunDirectory::at(const std::string& name) const { return location_.within(name); }

RunDirectory RunDirectory::until(const Deadline& deadline) const {
  RunDirectory same = *this;
  same.location_ = location_.until(deadline);
  return same;
}

std::vector<StepInfo> RunDirectory::list(Listing* listed) const {
  Listing found = location_.storage().listing("", Depth::kLevel);
  std::vector<StepInfo> steps = steps_among(found);
  if (listed != nullptr) *listed = std::move(found);
  return steps;
}

std::vector<StepInfo> RunDirectory::steps_among(const Listing& listed) const {
  std::vector<StepInfo> found;
  const auto note = [&](const std::string& name, bool is_link) {
    const auto step = names_.step_of(name);
    if (step && (!is_link || is_linked_folder(at(name)))) {
      found.push_back({.step = *step, .name = name, .is_link = is_link});
    }
  };
  for (const std::string& name : listed.directories) note(name, false);
  for (const std::string& name : listed.files) note(name, true);
  std::sort(found.begin(), found.end(), [&](const StepInfo& a, const StepInfo& b) {
    if (a.step != b.step) return a.step < b.step;
    const std::string own = names_.name_of(a.step);
    return a.name == own || b.name == own ? b.name == own : a.name < b.name;
  });
  return found;
}

// The hints are listed first: so the folder of each is seen, if it has not been removed since.
RunDirectory::Contents RunDirectory::contents() const {
  Storage& run = location_.storage();
  engine::Hints hints;
  or_log(LogLevel::kWarning, "each step is looked at, because the hints can't be read",
         [&] { hints = engine::read_hints(run); });
  const Listing listed = run.listing("", Depth::kLevel);
  Contents here{steps_among(listed), std::move(hints.void_files), listed.files, {}};
  for (StepInfo& each : here.steps) {
    const auto found = each.is_link ? hints.steps.end() : hints.steps.find(each.name);
    if (found == hints.steps.end()) continue;
    const std::string manifest = manifest_name(found->second.save_id);
    if (!run.facts().costs_requests && !at(each.name).storage().stat(manifest)) continue;
    found->second.step = each.step;
    each = std::move(hints.steps.extract(found).mapped());
  }
  for (const auto& [name, hinted] : hints.steps) here.idle.push_back(hinted.hint);
  for (const std::string& name : listed.directories) {
    const auto sibling = engine::parse_sibling_name(name);
    if (sibling && names_.step_of(sibling->location)) here.hidden.insert(sibling->location);
  }
  return here;
}

std::vector<StepInfo> RunDirectory::steps() const { return looked_at(*this, contents().steps); }

StepInfo RunDirectory::look(const StepInfo& listed) const {
  return engine::look_at(at(listed.name).shared(), listed).info;
}

std::string RunDirectory::name_of(uint64_t step) const {
  const auto found = last_of(list(), step);
  return found ? found->name : names_.name_of(step);
}

std::optional<StepInfo> RunDirectory::find(uint64_t step) const {
  const auto found = last_of(list(), step);
  return found ? std::optional(look(*found)) : std::nullopt;
}

namespace {

// What RunDirectory::newest finds.
class Newest {
 public:
  Newest(const RunDirectory& run, bool fallback) : run_(run), fallback_(fallback) {}

  bool take(const engine::Look& seen) {
    if (seen.info.state == StepState::kDurable) {
      found_ = seen.info;
    } else if (!seen.error) {
      log(LogLevel::kWarning,
          fmt::format("{} in {} is skipped: it is {} ({})", seen.info.name,
                      run_.location().describe(), to_string(seen.info.state), seen.info.problem));
    } else {
      // Whether the step is damaged is not known if it can't be read at all.
      if (!fallback_ || seen.error->code() == ErrorCode::kIo) {
        throw about_newest(*seen.error, seen.info.name);
      }
      damaged_.push_back(seen.info);
    }
    return found_.has_value();
  }

  // Takes those above the found step of which it is not known whether they are of its line, because
  // they are no checkpoints yet, or because their manifests can't be read.
  void take_unknown(const std::vector<StepInfo>& steps, const Names& damaged) {
    if (!found_ || found_->lineage.run.empty()) return;
    const StepInfo found = *found_;
    for (auto each = steps.rbegin(); each != steps.rend() && each->step > found.step; ++each) {
      if (!each->lineage.run.empty() || is_among(damaged, each->name)) continue;
      const auto storage = run_.at(each->name).shared();
      const engine::Look seen = engine::look_at(storage, *each);
      if (seen.info.state == StepState::kDurable) continue;
      if (seen.error && !has_folder(run_, each->name)) continue;  // removed meanwhile
      // One of another writer is of the line without a run, which counts less.
      const bool is_older = seen.error && !seen.lost_manifest &&
                            each->state != StepState::kDamaged &&
                            engine::may_be_checkpoint(*storage);
      if (is_older) {
        log(LogLevel::kWarning,
            fmt::format("{} in {} is passed over: it is damaged ({})", each->name,
                        run_.location().describe(), seen.info.problem));
      } else {
        take(seen);
      }
    }
  }

  // `lost`: receives the names of damaged steps.
  std::optional<StepInfo> result(std::vector<std::string>* lost) const {
    if (damaged_.empty()) return found_;
    const std::string text = lost_text(damaged_, found_) + ", in " + run_.location().describe();
    if (!found_) {
      throw Error(ErrorCode::kCorrupt, text)
          .with_hint("a restore that names a step takes it, whatever its line");
    }
    log(LogLevel::kWarning, text);
    for (const StepInfo& each : damaged_) {
      if (lost != nullptr) lost->push_back(each.name);
    }
    return found_;
  }

 private:
  const RunDirectory& run_;
  bool fallback_;
  std::vector<StepInfo> damaged_;
  std::optional<StepInfo> found_;
};

}  // namespace

std::vector<StepInfo> RunDirectory::list_lineages() const {
  std::vector<StepInfo> listed = contents().steps;
  for (StepInfo& each : listed) {
    if (each.hint.empty()) engine::read_lineage(at(each.name).storage(), each);
  }
  return listed;
}

std::optional<StepInfo> RunDirectory::newest(bool fallback, const Names& damaged,
                                             Names* lost) const {
  const std::vector<StepInfo> steps = list_lineages();
  if (steps.empty()) warn_of_other_checkpoints(location_);
  Newest newest(*this, fallback);
  const auto look = [&](const StepInfo& listed) {
    return engine::look_at(at(listed.name).shared(), listed);
  };
  engine::follow(*this, steps, damaged, look,
                 [&](const engine::Look& seen) { return newest.take(seen); });
  newest.take_unknown(steps, damaged);
  return newest.result(lost);
}

std::optional<uint64_t> RunDirectory::latest() const {
  std::optional<uint64_t> found;
  const auto look = [&](const StepInfo& each) { return engine::look_or_believe(*this, each); };
  engine::follow(*this, list_lineages(), {}, look, [&](const engine::Look& seen) {
    if (seen.info.state == StepState::kDurable) found = seen.info.step;
    return found.has_value();
  });
  return found;
}

std::optional<uint64_t> RunDirectory::best(const Best& best) const {
  std::vector<StepInfo> durable = steps();
  std::erase_if(durable, [](const StepInfo& info) { return info.state != StepState::kDurable; });
  const StepInfo* tip = tip_of(durable);
  if (tip == nullptr) return std::nullopt;
  const std::vector<uint64_t> found = best_steps(line_of(durable, *tip), best);
  return found.empty() ? std::nullopt : std::optional(found.front());
}

bool is_run_directory(const RunDirectory& run) {
  return !run.list().empty() && !engine::may_be_checkpoint(run.location().storage());
}

std::optional<std::vector<StepInfo>> steps_of_run(const RunDirectory& run) {
  std::optional<std::vector<StepInfo>> found;
  const RunDirectory::Contents here = run.contents();
  if (here.steps.empty()) return found;
  if (engine::may_be_checkpoint(run.location().storage(), here.files)) return found;
  return looked_at(run, here.steps);
}

}  // namespace tilestone
