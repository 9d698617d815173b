#include "tilestone/engine/training_run/megatron_run_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/base/number_text.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/format/index.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone::engine {
namespace {

constexpr const char* kIterationPattern = "iter_{step:07}";
constexpr std::string_view kRelease = "release";
constexpr uint64_t kMaxTrackerBytes = 64;  // an iteration and white space

RunDirectory directory_of(const Location& run) { return RunDirectory(run, kIterationPattern); }

std::string path_in(const Location& run, const std::string& name) {
  return run.describe() + "/" + name;
}

std::string_view stripped(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  return text.substr(0, text.find_last_not_of(kSpace) + 1);
}

bool is_missing_or_damaged(const Error& error) {
  return error.code() == ErrorCode::kNotFound || error.code() == ErrorCode::kCorrupt;
}

// The folders of iterations, the newest first. Other programs' names don't count.
std::vector<MegatronStep> iterations_in(const Location& run) {
  std::vector<MegatronStep> found;
  for (const StepInfo& each : directory_of(run).list()) {
    const MegatronStep step{.iteration = each.step};
    if (each.name == step.name()) found.push_back(step);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

// Folders such as "iter_100", which a person has made.
void warn_of_misnamed(const Location& run) {
  for (const std::string& name : run.storage().list_directories("iter")) {
    const auto number =
        number_in<uint64_t>(std::string_view(name).substr(name.starts_with("iter_") ? 5 : 4));
    const std::string right = MegatronStep{.iteration = number.value_or(0)}.name();
    if (!number || name == right) continue;
    log(LogLevel::kWarning,
        fmt::format("{} is not recognised as a checkpoint: its folder would have to be named {}",
                    path_in(run, name), right));
  }
}

bool has_release(const Location& run) {
  return contains_name(run.storage().list_directories(std::string(kRelease)), kRelease);
}

// Refuses a checkpoint where a run's directory is expected, instead of starting a new run.
void refuse_checkpoint(const Location& location) {
  if (!may_be_checkpoint(location.storage())) return;
  const std::filesystem::path path = location.identity();
  const auto step = StepNames(kIterationPattern).step_of(path.filename().string());
  throw Error(ErrorCode::kInvalidArgument,
              "a checkpoint is given where the directory of a run is expected")
      .with_file(path.string())
      .with_hint("give " + path.parent_path().string() +
                 (step ? fmt::format(", and ckpt_step={}", *step) : std::string()));
}

// The newest checkpoint that can be loaded. `tried`: what the tracker names; `why`: why that is not
// the answer.
std::optional<MegatronStep> newest_valid(const Location& run,
                                         const std::optional<MegatronStep>& tried,
                                         const std::string& why, bool has_tracker) {
  std::vector<MegatronStep> candidates = iterations_in(run);
  warn_of_misnamed(run);
  if (has_release(run)) candidates.push_back({.release = true});
  if (!candidates.empty() || has_tracker) {
    log(LogLevel::kWarning, why + "; looking for the newest valid checkpoint");
  }
  std::optional<Error> damaged;
  for (const MegatronStep& step : candidates) {
    if (step == tried) continue;
    const auto problem = megatron_problem(run, step);
    if (!problem) {
      log(LogLevel::kWarning, "The newest valid checkpoint is " + path_in(run, step.name()));
      return step;
    }
    log(LogLevel::kWarning, std::string("Skipping a checkpoint: ") + problem->what());
    if (!damaged && problem->code() == ErrorCode::kCorrupt) damaged = problem;
  }
  if (has_tracker) {
    throw Error(ErrorCode::kCorrupt,
                fmt::format("{}; {} does not hold a valid checkpoint", why, run.describe()))
        .with_hint("remove the tracker to start a new run");
  }
  if (damaged) {
    throw Error(ErrorCode::kCorrupt,
                fmt::format("{} does not hold a valid checkpoint, but a damaged one: {}",
                            run.describe(), damaged->what()))
        .with_hint("remove it to start a new run");
  }
  refuse_checkpoint(run);
  return std::nullopt;
}

// The checkpoint that the tracker names; if it can't be loaded, the newest valid one.
std::optional<MegatronStep> latest_of(const Location& run, bool may_be_release) {
  const std::string tracker = path_in(run, kMegatronTracker);
  std::optional<MegatronStep> named;
  std::string why;
  bool has_tracker = true;
  try {
    named = read_megatron_tracker(run);
    if (named->release && !may_be_release) {
      why = tracker + " names a release, which can't be non-persistent";
    } else if (const auto problem = megatron_problem(run, *named)) {
      why = fmt::format("the tracker {} names a checkpoint that can't be loaded: {}", tracker,
                        problem->what());
    } else {
      return named;
    }
  } catch (const Error& error) {
    if (!is_missing_or_damaged(error)) throw;
    has_tracker = error.code() == ErrorCode::kCorrupt;
    why = error.what();
  }
  return newest_valid(run, named, why, has_tracker);
}

MegatronChoice choice_of(const MegatronPlaces& places, uint64_t iteration) {
  const MegatronStep step{.iteration = iteration};
  std::string problems;
  bool is_damaged = false;
  for (const auto from : {MegatronChoice::From::kLoad, MegatronChoice::From::kNonPersistent}) {
    const auto& place = from == MegatronChoice::From::kLoad ? places.load : places.non_persistent;
    if (!place) continue;
    const auto problem = megatron_problem(*place, step);
    if (!problem) return {step, from};
    problems += (problems.empty() ? ": " : "; ") + std::string(problem->what());
    is_damaged |= problem->code() == ErrorCode::kCorrupt;
  }
  throw Error(is_damaged ? ErrorCode::kCorrupt : ErrorCode::kNotFound,
              fmt::format("there is no {}checkpoint of iteration {} (ckpt_step){}",
                          is_damaged ? "intact " : "", iteration, problems));
}

}  // namespace

std::string MegatronStep::name() const {
  return release ? std::string(kRelease) : fmt::format("iter_{:07}", iteration);
}

void expect_run(const Location& location) {
  if (location.storage().stat(kMegatronTracker) || has_release(location)) return;
  if (iterations_in(location).empty()) refuse_checkpoint(location);
}

MegatronStep read_megatron_tracker(const Location& run, const std::string& name) {
  const std::string path = path_in(run, name);
  Bytes bytes;
  try {
    bytes = read_file(run.storage(), name, kMaxTrackerBytes);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound) {
      throw Error(ErrorCode::kNotFound, "there is no tracker file " + path);
    }
    if (error.code() == ErrorCode::kCorrupt) throw;
    throw Error(ErrorCode::kIo, "can't read the tracker file " + path + ": " + error.message())
        .with_errno(error.sys_errno());
  }
  const std::string_view text = stripped(as_text(bytes));
  if (text == kRelease) return {.release = true};
  const auto iteration = number_in<uint64_t>(text);
  if (iteration) return {.iteration = *iteration};
  throw Error(ErrorCode::kCorrupt,
              fmt::format("the tracker file {} holds no iteration: '{}'", path, text));
}

std::optional<Error> megatron_problem(const Location& run, const MegatronStep& step) {
  const Location at = run.within(step.name());
  const std::string path = path_in(run, step.name());
  const auto unpublished = [&](const std::string& why) {
    return Error(ErrorCode::kNotFound, fmt::format("{}: {}", path, why));
  };
  try {
    const Look look = look_at(at.shared()->held(), {.step = step.iteration, .name = step.name()});
    const StepInfo& info = look.info;
    if (info.state == StepState::kForeign) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} can't be loaded: {}", path, info.problem))
          .with_hint("convert it with the program that has saved it");
    }
    if (look.error && info.format.empty()) throw *look.error;
    if (info.state == StepState::kUnfinished) return unpublished(info.problem);
    if (info.dialect != "megatron") {
      return unpublished(fmt::format("it has no {}: its save has not ended", kMegatronConfig));
    }
    if (!Checkpoint::open(at).common()) {
      throw Error(ErrorCode::kCorrupt, "it does not hold common state");
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound) return unpublished("there is no such directory");
    if (error.code() != ErrorCode::kCorrupt) throw;
    return error.with_message(fmt::format("{}: {}", path, error.message()));
  }
  return std::nullopt;
}

std::optional<MegatronChoice> choose_megatron_step(const MegatronPlaces& places) {
  if (places.iteration) return choice_of(places, *places.iteration);
  std::vector<Error> problems;
  const auto latest = [&](const std::optional<Location>& place, bool may_be_release) {
    try {
      return place ? latest_of(*place, may_be_release) : std::nullopt;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCorrupt) throw;
      problems.push_back(error);
      return std::optional<MegatronStep>();
    }
  };
  const auto found = latest(places.load, true);
  const auto fleeting = latest(places.non_persistent, false);
  if (!found && !fleeting && !problems.empty()) throw problems.front();
  for (const Error& problem : problems) {
    log(LogLevel::kWarning, std::string("Skipping a directory: ") + problem.what());
  }
  if (fleeting && (!found || fleeting->iteration >= found->iteration)) {
    return MegatronChoice{*fleeting, MegatronChoice::From::kNonPersistent};
  }
  if (found) return MegatronChoice{*found};
  if (!places.pretrained) return std::nullopt;
  const auto start = latest_of(*places.pretrained, true);
  if (start) return MegatronChoice{*start, MegatronChoice::From::kPretrained};
  throw Error(ErrorCode::kNotFound,
              fmt::format("there is no checkpoint in {} or in {}",
                          places.load ? places.load->describe() : std::string("load"),
                          places.pretrained->describe()));
}

std::vector<std::string> move_megatron_tracker(const Location& run, const MegatronStep& saved,
                                               uint64_t interval, bool only_newest) {
  std::vector<std::string> replaced;
  std::optional<MegatronStep> before;
  try {
    before = read_megatron_tracker(run);
  } catch (const Error& error) {
    if (!is_missing_or_damaged(error)) throw;
  }
  if (only_newest) {
    for (const MegatronStep& each : iterations_in(run)) {
      if (each != saved) replaced.push_back(each.name());
    }
  } else if (interval > 0 && !saved.release && before && !before->release &&
             before->iteration > 0 && before->iteration < saved.iteration &&
             before->iteration % interval != 0) {
    replaced.push_back(before->name());
  }
  const std::string text = saved.release ? std::string(kRelease) : std::to_string(saved.iteration);
  const std::string staged = fmt::format(".{}.tilestone", kMegatronTracker);
  remove_files(run.storage(), {&staged, 1});  // of a save that was killed
  run.storage().publish(kMegatronTracker, staged, as_bytes(text), true, Deadline::never());
  return replaced;
}

void remove_megatron_steps(const Location& run, const std::vector<std::string>& names) {
  const RunDirectory directory = directory_of(run);
  for (const std::string& name : names) {
    const auto keep = [&](const std::string& why) {
      log(LogLevel::kWarning, fmt::format("{} is not removed: {}", path_in(run, name), why));
      return false;
    };
    directory.remove(name, [&](Storage& folder) {
      const auto mark = folder.stat(std::string(kMegatronConfig));
      if (!mark || mark->size == 0) return keep("its save has not ended");
      // A job that takes no locks may have gone back to it.
      if (read_megatron_tracker(run).name() == name) return keep("the tracker names it again");
      return true;
    });
  }
  directory.end_removals();
}

}  // namespace tilestone::engine
