#include "tilestone/engine/training_run/checkpoint_manager.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/base/per_process.h"
#include "tilestone/base/size_text.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/commit/attributes_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/engine/training_run/pruning_internal.h"
#include "tilestone/engine/training_run/same_steps_internal.h"
#include "tilestone/engine/training_run/shared_files_internal.h"

namespace tilestone {
namespace {

constexpr const char* kChoice = "choice of a checkpoint";
constexpr const char* kAgain = "saving a step once more";

// A step that was chosen for a restore.
struct Chosen {
  uint64_t step = 0;
  std::string name = {};               // of the folder
  std::vector<std::string> lost = {};  // folders of damaged steps that were skipped
  std::string save_id = {};
  Lineage lineage = {};
};

// As in base/both_ways.h.
void walk_choice(auto& io, auto& chosen) {
  both::varint(io, chosen.step);
  both::text(io, chosen.name);
  both::text(io, chosen.save_id);
  engine::walk_lineage(io, chosen.lineage);
  both::texts(io, chosen.lost);
}

Bytes encode_choice(const std::optional<Chosen>& chosen) {
  ByteWriter writer;
  if (chosen) walk_choice(writer, *chosen);
  return std::move(writer).take();
}

std::optional<Chosen> decode_choice(ByteView bytes) {
  if (bytes.empty()) return std::nullopt;
  ByteReader reader(bytes, kChoice);
  Chosen chosen;
  walk_choice(reader, chosen);
  return chosen;
}

// The durable step of a number. Error(kNotFound), or why it is damaged.
StepInfo expect_durable(const RunDirectory& run, uint64_t step) {
  const auto found = run.find(step);
  if (found && found->state == StepState::kDurable) return *found;
  std::string others;
  for (const StepInfo& each : run.list()) others += fmt::format(" {}", each.step);
  const bool damaged = found && found->state == StepState::kDamaged;
  throw Error(
      damaged ? ErrorCode::kCorrupt : ErrorCode::kNotFound,
      fmt::format("there is no durable checkpoint of step {} in {}{}", step,
                  run.location().describe(),
                  found ? fmt::format(": it is {} ({})", to_string(found->state), found->problem)
                        : std::string()))
      .with_hint(others.empty() ? "there is no step at all" : "steps with a folder are" + others);
}

Chosen chosen_of(StepInfo step, std::vector<std::string> lost = {}) {
  return {step.step, std::move(step.name), std::move(lost), std::move(step.save_id),
          std::move(step.lineage)};
}

}  // namespace

struct ManagedRun::State {
  RunDirectory directory;
  RunOptions options;
  std::unique_ptr<PerProcess<engine::Pruning>> pruning;
  std::atomic<bool> leads = false;              // this is rank 0
  std::optional<uint64_t> last = std::nullopt;  // the step that was saved or restored last
  bool is_last_saved = false;
  std::vector<std::string> last_folders = {};  // of the two steps that were saved or restored last
  std::set<std::string> lost = {};  // folders of damaged steps that the run has gone back behind
  std::map<std::string, std::string> lost_saves = {};  // on rank 0, their save ids
  std::shared_ptr<RunStep> begun = nullptr;            // of the last save
  std::shared_ptr<const Inventory> before = nullptr;   // on rank 0, of the step before
  uint64_t before_step = 0;
  // Of the next save. The parent is the step that was saved or restored last; the run's id is made
  // by the first save that continues no step with one.
  Lineage lineage = {};
  std::optional<std::vector<StepInfo>> steps_seen = std::nullopt;  // on_hosts: once it is known
  bool has_said_beside = false;
  bool has_said_replaced = false;

  // What the last save has said.
  void end_last() {
    const auto ended = std::exchange(begun, nullptr);
    if (ended == nullptr || ended->save_id.empty()) return;
    before = std::make_shared<Inventory>(std::move(ended->now));
    before_step = last.value_or(0);
    lineage.parent = StepId{before_step, ended->save_id};
  }

  // A save has failed.
  void forget_last() {
    end_last();  // the one before may have become durable
    is_last_saved = false;
    before = nullptr;
  }

  // The steps of the directory. One that can't be read stops a run that knows its place in its
  // line, or that saves to the hosts first, from nothing.
  std::vector<StepInfo> steps_for(uint64_t step, const Deadline& deadline) {
    if (steps_seen) return *steps_seen;
    const RunDirectory run = directory.until(deadline);
    if (!options.on_hosts && !is_last_saved) return run.list_lineages();
    std::vector<StepInfo> found;
    or_log(LogLevel::kWarning, fmt::format("step {} is saved without a look at other steps", step),
           [&] {
             found = run.list_lineages();
             if (options.on_hosts) steps_seen = found;
           });
    return found;
  }

  // A step that is about to be saved.
  StepInfo next(uint64_t step, const std::vector<StepInfo>& steps) {
    if (lineage.run.empty()) lineage.run = random_uuid().substr(0, 8);
    for (const StepInfo& each : steps) {
      lineage.ordinal = std::max(lineage.ordinal, each.lineage.ordinal);
    }
    ++lineage.ordinal;
    return {.step = step, .name = directory.names().name_of(step), .lineage = lineage};
  }

  bool is_durable(const StepInfo& step) const {
    bool is_durable = false;
    or_log(LogLevel::kDebug, "looking at " + step.name,
           [&] { is_durable = directory.look(step).state == StepState::kDurable; });
    return is_durable;
  }

  // Says once which step of another line stands above the line's newest one.
  void say_beside(const std::vector<StepInfo>& steps, const Line& line) {
    if (has_said_beside) return;
    const auto found = steps_beside(steps, line);
    const auto durable = std::find_if(found.begin(), found.end(),
                                      [&](const StepInfo* each) { return is_durable(*each); });
    if (durable == found.end()) return;
    const StepInfo* beside = *durable;
    has_said_beside = true;
    const std::string where = directory.location().describe();
    const std::string& run = line.front()->lineage.run;
    const std::string what =
        !run.empty() && beside->lineage.run == run
            ? std::string("of a branch that this run has left")
            : fmt::format("of another run ('tilestone gc {} --line {}' lists its steps)", where,
                          run_name(beside->lineage));
    log(LogLevel::kWarning,
        fmt::format("step {} in {} has a higher step beside it, {}, which is {}. The run goes on "
                    "from the step that was saved last, whatever its number; a restore of step {} "
                    "has to name it",
                    line.front()->step, where, beside->step, what, beside->step));
  }

  // Whether the checkpoint in the step's folder is of a branch that the run has left. It says so
  // itself: a hint may be of an older one.
  bool replaces(const std::vector<StepInfo>& steps, const Line& line) {
    const auto same = std::find_if(steps.begin(), steps.end(), [&](const StepInfo& each) {
      return each.name == line.front()->name;
    });
    if (same == steps.end() || !is_abandoned(*same, line)) return false;
    const StepInfo standing = directory.look(*same);
    if (standing.state == StepState::kDurable && !is_abandoned(standing, line)) return false;
    if (!std::exchange(has_said_replaced, true)) {
      log(LogLevel::kWarning,
          fmt::format("{} in {} is of a branch that this run has left; it is replaced, and so are "
                      "later ones",
                      same->name, directory.location().describe()));
    }
    return true;
  }

  // The folder of another name that holds a durable checkpoint of the step, unless the run has left
  // it behind; "": there is none.
  std::string other_folder(const std::vector<StepInfo>& steps, const Line& line) const {
    for (const StepInfo& each : steps) {
      if (each.step != line.front()->step || each.name == line.front()->name) continue;
      if (!is_abandoned(each, line) && is_durable(each)) return each.name;
    }
    return "";
  }

  // What the step before holds: what the last save has said, or else what the step does that the
  // line continues; of a line that begins, the newest durable one below it.
  void find_before(const std::vector<StepInfo>& steps, const Line& line) {
    if (before != nullptr) return;
    const uint64_t step = line.front()->step;
    Line candidates(line.begin() + 1, line.end());
    if (!line.front()->lineage.parent) {
      for (const StepInfo& each : steps) {
        if (each.step < step) candidates.insert(candidates.begin(), &each);
      }
    }
    or_log(LogLevel::kWarning, fmt::format("step {} is not compared with the one before", step),
           [&] {
             for (const StepInfo* each : candidates) {
               if (directory.look(*each).state != StepState::kDurable) continue;
               before = std::make_shared<Inventory>(inventory_of(directory.at(each->name)));
               before_step = each->step;
               return;
             }
           });
  }

  // ---- Saving

  // The folder of the step, as rank 0 sees it, if it was saved or restored last and is durable; ""
  // if its save has failed, or if the step has another checkpoint. For any other step "", and no
  // message.
  std::string saved_before(const Communicator& comm, uint64_t step, Deadline deadline) {
    if (last != step) return "";
    const Bytes folder = engine::decided_by_rank_0(comm, kAgain, deadline, [&] {
      if (options.on_hosts) {
        end_last();
        const bool is_saved = lineage.parent && lineage.parent->step == step;
        return to_bytes(is_saved ? directory.names().name_of(step) : "");
      }
      pruning->get().wait();  // it may hold the step's lock
      end_last();
      return to_bytes(standing(step, deadline));
    });
    return std::string(as_text(folder));
  }

  // The folder of the step that was saved or restored last, if it is durable in the directory.
  std::string standing(uint64_t step, const Deadline& deadline) const {
    const auto found = directory.until(deadline).find(step);
    if (!found || found->state != StepState::kDurable || found->save_id.empty()) return "";
    return lineage.parent == StepId{step, found->save_id} ? found->name : "";
  }

  // Adds metrics to a step that is saved already. False: it is to be saved once more, with those in
  // `metrics`.
  bool settle(const Communicator& comm, uint64_t step, std::string folder,
              std::map<std::string, double>& metrics, const ManagedRun::SaveWork& work,
              Deadline deadline) {
    const Bytes answer = engine::decided_by_rank_0(comm, kAgain, deadline, [&] {
      if (options.on_hosts) {
        folder.clear();
        auto kept = work.once_more ? work.once_more() : std::nullopt;
        if (kept || !metrics.empty()) {
          or_log(LogLevel::kWarning, fmt::format("looking for step {}", step),
                 [&] { folder = standing(step, deadline); });
        }
        if (kept && folder.empty()) {
          metrics.merge(*kept);
          return to_bytes("once more");
        }
      }
      if (metrics.empty()) return Bytes();
      if (folder.empty()) {
        log(LogLevel::kWarning,
            fmt::format("the metrics of step {} are those of its first save", step));
        return Bytes();
      }
      engine::set_attributes(directory.at(folder).shared(), attributes_of(metrics), deadline);
      pruning->get().after(step);
      return Bytes();
    });
    if (!answer.empty()) return false;
    is_last_saved = true;
    return true;
  }

  // Communicates only if the restored run has lost that very step to damage.
  void make_room(const Communicator& comm, uint64_t step, const ManagedRun::Limit& limit) {
    const auto found = std::find_if(lost.begin(), lost.end(), [&](const auto& name) {
      return directory.names().step_of(name) == step;
    });
    if (found == lost.end()) return;
    const std::string name = *found;
    engine::decided_by_rank_0(comm, "removal of a damaged checkpoint", limit(), [&] {
      const std::string what = name + " in " + directory.location().describe();
      log(LogLevel::kWarning, "removing the damaged " + what + ": the step is saved again");
      const StepInfo seen{.step = step, .name = name, .save_id = lost_saves[name]};
      if (directory.remove(seen) == Removed::kNot) {
        throw Error(ErrorCode::kAlreadyExists, "the damaged " + what + " can't be removed")
            .with_hint("the log says why");
      }
      return Bytes();
    });
    lost.erase(name);
  }

  // What rank 0 adds to the step.
  void describe(RunStep& made, uint64_t step, const std::map<std::string, double>& metrics,
                const Deadline& deadline) {
    end_last();
    const std::vector<StepInfo> steps = steps_for(step, deadline);
    const StepInfo next_step = next(step, steps);
    const Line line = line_of(steps, next_step);
    made.attributes = attributes_of(metrics);
    made.attributes.merge(to_attributes(next_step.lineage));
    made.attributes.emplace("step", std::to_string(step));
    made.exists_as = other_folder(steps, line);
    made.replaces = replaces(steps, line);
    if (options.on_hosts && !made.replaces) {  // otherwise the transaction says so
      for (const StepInfo& each : steps) {
        if (each.name == line.front()->name && is_durable(each)) made.exists_as = each.name;
      }
    }
    say_beside(steps, line);
    find_before(steps, line);
    made.before = before;
    made.before_name = fmt::format("step {}", before_step);
  }

  // What a save of the step gets as SaveOptions::step.
  std::shared_ptr<RunStep> begin(const Communicator& comm, uint64_t step,
                                 const std::map<std::string, double>& metrics,
                                 const Deadline& deadline) {
    auto made = std::make_shared<RunStep>();
    made->name = fmt::format("step {}", step);
    made->strict = options.strict;
    if (options.reuse && !options.on_hosts)
      made->reuse = engine::step_to_reuse(directory, last_folders);
    if (!comm.is_coordinator()) return made;
    try {
      describe(*made, step, metrics, deadline);
    } catch (const Error& error) {
      made->refused = error;
    }
    return made;
  }

  // ---- Restoring

  // What stands in these folders may be removed later, and nothing that is saved there since.
  void remember_saves(const std::vector<std::string>& damaged) {
    for (const std::string& name : damaged) {
      StepInfo info;
      engine::read_lineage(directory.at(name).storage(), info);
      lost_saves[name] = info.save_id;
    }
  }

  // `files`: of the run's directory.
  void say_fast_tier(const std::vector<std::string>& files) const {
    if (options.on_hosts || std::ranges::none_of(files, [](const std::string& name) {
          return name.starts_with(engine::kFastMarker);
        })) {
      return;
    }
    log(LogLevel::kWarning,
        fmt::format("the run in {} has saved to a fast tier: steps that are on its hosts alone are "
                    "found by a manager with fast=",
                    directory.location().describe()));
  }

  std::optional<Chosen> choose(std::optional<uint64_t> step, bool fallback,
                               const Deadline& deadline) {
    const RunDirectory run = directory.until(deadline);
    if (step) return chosen_of(expect_durable(run, *step));
    std::vector<std::string> skipped;
    const auto found = run.newest(fallback, {lost.begin(), lost.end()}, &skipped);
    remember_saves(skipped);
    if (!found) return std::nullopt;
    const std::vector<StepInfo> steps = run.list_lineages();
    say_beside(steps, line_of(steps, *found));
    return chosen_of(*found, std::move(skipped));
  }

  // After a load of the chosen step has failed because something was missing or damaged. nullopt:
  // the failure counts.
  std::optional<Chosen> choose_again(const Chosen& failed, const Error& error, bool fallback) {
    const std::vector<StepInfo> listed = directory.list();
    const bool stands = std::any_of(listed.begin(), listed.end(), [&](const StepInfo& each) {
      return each.name == failed.name && directory.look(each).state != StepState::kUnfinished;
    });
    if (stands && !fallback) return std::nullopt;
    std::vector<std::string> damaged(lost.begin(), lost.end());
    damaged.insert(damaged.end(), failed.lost.begin(), failed.lost.end());
    damaged.push_back(failed.name);
    std::vector<std::string> skipped = failed.lost;
    if (stands) {
      for (std::string& name : engine::steps_that_share(directory, failed.name, error.file())) {
        log(LogLevel::kWarning,
            fmt::format("{} has the same damaged file as {}", name, failed.name));
        damaged.push_back(std::move(name));
      }
    }
    const auto found = directory.newest(fallback, damaged, &skipped);
    if (!found) return std::nullopt;
    if (stands) {
      skipped.push_back(failed.name);
      remember_saves(skipped);
      log(LogLevel::kWarning,
          fmt::format("{} is damaged ({}); the run continues from {}, so what it did in {} is "
                      "lost, in {}",
                      failed.name, error.what(), found->name,
                      counted(std::max(failed.step, found->step) - found->step, "step"),
                      directory.location().describe()));
    }
    return chosen_of(*found, std::move(skipped));
  }

  // The state of this step was loaded: the next save continues it.
  void restored(const Chosen& chosen) {
    lost.insert(chosen.lost.begin(), chosen.lost.end());
    last = chosen.step;
    is_last_saved = false;
    last_folders = {chosen.name};
    begun = nullptr;
    before = nullptr;
    lineage = chosen.lineage;
    lineage.parent = StepId{chosen.step, chosen.save_id};
    if (chosen.lineage.run.empty()) lineage.after = chosen.step;
  }
};

ManagedRun::ManagedRun(Location location, RunOptions options) {
  if (options.every == 0) {
    throw Error(ErrorCode::kInvalidArgument, "every is 0; expected a number of steps, at least 1");
  }
  if (options.keep) check_keep(*options.keep);
  RunDirectory directory(std::move(location), options.name);
  const auto make = [run = directory, keep = options.keep] {
    return std::make_unique<engine::Pruning>(run, keep);
  };
  auto pruning = std::make_unique<PerProcess<engine::Pruning>>(make);
  state_.reset(new State{std::move(directory), std::move(options), std::move(pruning)});
}

ManagedRun::~ManagedRun() = default;
ManagedRun::ManagedRun(ManagedRun&& other) noexcept = default;
ManagedRun& ManagedRun::operator=(ManagedRun&& other) noexcept = default;

const RunDirectory& ManagedRun::directory() const { return state_->directory; }

void ManagedRun::expect_same_steps(
    const Communicator& comm, Deadline deadline,
    const std::vector<std::pair<std::string, std::string>>& terms) const {
  if (comm.size() == 1) return;
  engine::decided_on_same_steps(state_->directory, comm, "comparison of a run's directory",
                                deadline, terms, [] { return Bytes(); });
}

bool ManagedRun::is_due(uint64_t step) const { return step % state_->options.every == 0; }

bool ManagedRun::is_saved(uint64_t step) const {
  return state_->is_last_saved && state_->last == step;
}

bool ManagedRun::save(const Communicator& comm, uint64_t step,
                      const std::map<std::string, double>& metrics, bool force, bool overwrite,
                      const Limit& limit, const SaveWork& work) {
  if (!(force || is_due(step))) return false;
  const std::string folder = state_->saved_before(comm, step, limit());
  auto numbers = metrics;
  if (!folder.empty()) {
    const std::string difference = work.difference(folder);
    if (difference.empty()) {
      if (state_->settle(comm, step, folder, numbers, work, limit())) return true;
    } else if (!overwrite) {
      throw Error(ErrorCode::kAlreadyExists,
                  fmt::format("step {} is saved already, in {}, and the state is another one: {}",
                              step, folder, difference))
          .with_reason(Reason::kCheckpointExists)
          .with_hint(Hint{{"", "overwrite", "true", " replaces it"}});
    }
  }
  state_->leads = comm.is_coordinator();
  state_->make_room(comm, step, limit);
  auto begun = state_->begin(comm, step, numbers, limit());
  try {
    work.write(directory().names().name_of(step), begun);
  } catch (...) {
    state_->forget_last();
    throw;
  }
  state_->last = step;
  state_->last_folders.insert(state_->last_folders.begin(), directory().names().name_of(step));
  state_->last_folders.resize(std::min<size_t>(state_->last_folders.size(), 2));
  state_->is_last_saved = true;
  state_->begun = std::move(begun);
  return true;
}

std::optional<uint64_t> ManagedRun::restore(const Communicator& comm, std::optional<uint64_t> step,
                                            bool fallback, const Limit& limit, const Load& load) {
  const engine::Terms terms = {{"step", step ? std::to_string(*step) : "the newest"},
                               {"fallback", fallback ? "true" : "false"}};
  const Deadline deadline = limit();
  Listing listed;
  const auto choose = [&] {
    state_->say_fast_tier(listed.files);
    return encode_choice(state_->choose(step, fallback, deadline));
  };
  auto chosen = decode_choice(engine::decided_on_same_steps(state_->directory, comm, kChoice,
                                                            deadline, terms, choose, &listed));
  while (chosen) {
    try {
      load(chosen->step, chosen->name);
      state_->restored(*chosen);
      state_->steps_seen = std::nullopt;
      return chosen->step;
    } catch (const Error& error) {
      if (step || !engine::is_about_files(error)) throw;
      const auto next = decode_choice(engine::decided_by_rank_0(comm, kChoice, limit(), [&] {
        return encode_choice(state_->choose_again(*chosen, error, fallback));
      }));
      if (!next) throw;
      chosen = next;
    }
  }
  return std::nullopt;
}

void ManagedRun::continue_from(const StepInfo& step, std::vector<StepInfo> others) {
  State& state = *state_;
  state.restored(chosen_of(step));
  state.steps_seen = std::nullopt;
  static_cast<void>(state.steps_for(step.step, Deadline::never()));
  if (state.steps_seen) {
    state.steps_seen->insert(state.steps_seen->end(), others.begin(), others.end());
  }
}

void ManagedRun::note_ordinal(uint64_t ordinal) {
  state_->lineage.ordinal = std::max(state_->lineage.ordinal, ordinal);
}

void ManagedRun::failed() { state_->forget_last(); }

void ManagedRun::prune_after(uint64_t step) {
  if (state_->leads) state_->pruning->get().after(step);
}

void ManagedRun::wait() { state_->pruning->get().wait(); }

void ManagedRun::end() { state_->pruning->get().end(); }

}  // namespace tilestone
