#include "tilestone/engine/checkpoint_manager.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/base/per_process.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/agree.h"
#include "tilestone/engine/commit/attributes_internal.h"
#include "tilestone/engine/pruning_internal.h"

namespace tilestone {
namespace {

constexpr const char* kChoice = "choice of a checkpoint";
constexpr const char* kAgain = "saving a step once more";

Bytes encode_choice(const std::optional<ManagedRun::Chosen>& chosen) {
  ByteWriter writer;
  if (!chosen) return std::move(writer).take();
  writer.varint(chosen->step);
  writer.string(chosen->name);
  for (const std::string& name : chosen->lost) writer.string(name);
  return std::move(writer).take();
}

std::optional<ManagedRun::Chosen> decode_choice(ByteView bytes) {
  if (bytes.empty()) return std::nullopt;
  ByteReader reader(bytes, kChoice);
  ManagedRun::Chosen chosen;
  chosen.step = reader.varint();
  chosen.name = reader.string();
  while (reader.remaining() > 0) chosen.lost.emplace_back(reader.string());
  return chosen;
}

// Rank 0 decides for all.
Bytes decided_by_rank_0(const Communicator& comm, const char* work, Deadline deadline,
                        const std::function<Bytes()>& decide) {
  return agree(
      comm, work, deadline, [](int, const Bytes&) { return Bytes(); },
      [&](int, const std::vector<Bytes>&) { return Decision{decide(), true}; });
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

// The names of the damaged steps above `found`.
std::vector<std::string> damaged_above(const RunDirectory& run, uint64_t found) {
  std::vector<std::string> names;
  for (const StepInfo& each : run.list()) {
    if (each.step > found && run.look(each).state == StepState::kDamaged)
      names.push_back(each.name);
  }
  return names;
}

}  // namespace

struct ManagedRun::State {
  RunDirectory directory;
  RunOptions options;
  std::unique_ptr<PerProcess<engine::Pruning>> pruning = nullptr;  // if anything is removed
  std::optional<uint64_t> last = std::nullopt;  // the step that was saved or restored last
  bool is_last_saved = false;
  std::set<std::string> lost = {};  // folders of damaged steps that the run has gone back behind
  std::shared_ptr<RunStep> begun = nullptr;           // of the last save
  std::shared_ptr<const Inventory> before = nullptr;  // on rank 0, of the step before
  uint64_t before_step = 0;

  // The folder of another name that holds a durable checkpoint of the step; "": there is none.
  std::string other_folder(uint64_t step) const {
    try {
      for (const StepInfo& each : directory.list()) {
        if (each.step != step || each.name == directory.names().name_of(step)) continue;
        if (directory.look(each).state == StepState::kDurable) return each.name;
      }
    } catch (const Error& error) {
      log(LogLevel::kDebug, fmt::format("looking for step {}: {}", step, error.what()));
    }
    return "";
  }

  // What the step before holds, on rank 0: what the last save has said, or else what the newest
  // durable step below `step` does.
  void find_before(uint64_t step) {
    const auto ended = std::exchange(begun, nullptr);
    if (ended != nullptr && !ended->now.is_empty()) {
      before = std::make_shared<Inventory>(std::move(ended->now));
      before_step = last.value_or(0);
    }
    if (before != nullptr) return;
    try {
      const std::vector<StepInfo> listed = directory.list();
      for (auto each = listed.rbegin(); each != listed.rend(); ++each) {
        if (each->step >= step || directory.look(*each).state != StepState::kDurable) continue;
        before = std::make_shared<Inventory>(inventory_of(directory.at(each->name)));
        before_step = each->step;
        return;
      }
    } catch (const Error& error) {
      log(LogLevel::kWarning,
          fmt::format("step {} is not compared with the one before: {}", step, error.what()));
    }
  }
};

ManagedRun::ManagedRun(Location location, RunOptions options) {
  if (options.every == 0) {
    throw Error(ErrorCode::kInvalidArgument, "every is 0; expected a number of steps, at least 1");
  }
  if (options.keep) check_keep(*options.keep);
  RunDirectory directory(std::move(location), options.name);
  state_ = std::make_unique<State>(State{std::move(directory), std::move(options)});
  if (state_->options.keep) {
    const auto make = [run = state_->directory, keep = *state_->options.keep] {
      return std::make_unique<engine::Pruning>(run, keep);
    };
    state_->pruning = std::make_unique<PerProcess<engine::Pruning>>(make);
  }
}

ManagedRun::~ManagedRun() = default;
ManagedRun::ManagedRun(ManagedRun&& other) noexcept = default;
ManagedRun& ManagedRun::operator=(ManagedRun&& other) noexcept = default;

const RunDirectory& ManagedRun::directory() const { return state_->directory; }

bool ManagedRun::is_due(uint64_t step) const { return step % state_->options.every == 0; }

bool ManagedRun::is_saved(uint64_t step) const {
  return state_->is_last_saved && state_->last == step;
}

std::string ManagedRun::saved_before(const Communicator& comm, uint64_t step, Deadline deadline) {
  if (state_->last != step) return "";
  const Bytes folder = decided_by_rank_0(comm, kAgain, deadline, [&] {
    wait();  // pruning may hold the step's lock
    const auto found = state_->directory.find(step);
    if (!found || found->state != StepState::kDurable) return Bytes();
    const ByteView name = as_bytes(found->name);
    return Bytes(name.begin(), name.end());
  });
  return std::string(as_text(folder));
}

bool ManagedRun::is_settled(const Communicator& comm, uint64_t step, const std::string& folder,
                            const std::string& difference,
                            const std::map<std::string, double>& metrics, bool overwrite,
                            Deadline deadline) {
  if (!difference.empty()) {
    if (overwrite) return false;
    throw Error(ErrorCode::kAlreadyExists,
                fmt::format("step {} is saved already, in {}, and the state is another one: {}",
                            step, folder, difference))
        .with_hint("overwrite = true replaces it");
  }
  decided_by_rank_0(comm, kAgain, deadline, [&] {
    if (metrics.empty()) return Bytes();
    engine::set_attributes(state_->directory.at(folder).shared(), attributes_of(metrics), deadline);
    prune_after(step);
    return Bytes();
  });
  state_->is_last_saved = true;
  return true;
}

void ManagedRun::make_room(const Communicator& comm, uint64_t step, Deadline deadline) {
  const RunDirectory& run = state_->directory;
  const auto lost = std::find_if(state_->lost.begin(), state_->lost.end(), [&](const auto& name) {
    return run.names().step_of(name) == step;
  });
  if (lost == state_->lost.end()) return;
  const std::string name = *lost;
  decided_by_rank_0(comm, "removal of a damaged checkpoint", deadline, [&] {
    log(LogLevel::kWarning, fmt::format("removing the damaged {} in {}: the step is saved again",
                                        name, run.location().describe()));
    if (run.remove(name) == Removed::kNot) {
      throw Error(ErrorCode::kAlreadyExists, fmt::format("the damaged {} in {} can't be removed",
                                                         name, run.location().describe()));
    }
    return Bytes();
  });
  state_->lost.erase(name);
}

std::shared_ptr<RunStep> ManagedRun::begin(const Communicator& comm, uint64_t step,
                                           const std::map<std::string, double>& metrics) {
  auto begun = std::make_shared<RunStep>();
  begun->name = fmt::format("step {}", step);
  begun->strict = state_->options.strict;
  if (!comm.is_coordinator()) return begun;
  begun->attributes = attributes_of(metrics);
  begun->attributes.emplace("step", std::to_string(step));
  begun->exists_as = state_->other_folder(step);
  state_->find_before(step);
  begun->before = state_->before;
  begun->before_name = fmt::format("step {}", state_->before_step);
  return begun;
}

void ManagedRun::saved(uint64_t step, std::shared_ptr<RunStep> begun) {
  state_->last = step;
  state_->is_last_saved = true;
  state_->begun = std::move(begun);
}

void ManagedRun::failed() {
  state_->is_last_saved = false;
  state_->begun = nullptr;
  state_->before = nullptr;
}

void ManagedRun::prune_after(uint64_t step) {
  if (state_->pruning) state_->pruning->get().after(step);
}

void ManagedRun::wait() {
  if (state_->pruning) state_->pruning->get().wait();
}

std::optional<ManagedRun::Chosen> ManagedRun::choose(const Communicator& comm,
                                                     std::optional<uint64_t> step, bool fallback,
                                                     Deadline deadline) {
  const RunDirectory& run = state_->directory;
  const auto decide = [&]() -> std::optional<Chosen> {
    if (step) {
      const StepInfo found = expect_durable(run, *step);
      return Chosen{found.step, found.name};
    }
    const std::vector<std::string> without(state_->lost.begin(), state_->lost.end());
    const auto found = run.newest(fallback, without);
    if (!found) return std::nullopt;
    return Chosen{found->step, found->name,
                  fallback ? damaged_above(run, found->step) : std::vector<std::string>()};
  };
  return decode_choice(
      decided_by_rank_0(comm, kChoice, deadline, [&] { return encode_choice(decide()); }));
}

std::optional<ManagedRun::Chosen> ManagedRun::choose_again(const Communicator& comm,
                                                           const Chosen& failed,
                                                           const std::string& problem,
                                                           bool fallback, Deadline deadline) {
  const RunDirectory& run = state_->directory;
  const auto decide = [&]() -> std::optional<Chosen> {
    const std::vector<StepInfo> listed = run.list();
    const bool stands = std::any_of(listed.begin(), listed.end(),
                                    [&](const StepInfo& each) { return each.name == failed.name; });
    if (stands && !fallback) return std::nullopt;
    std::vector<std::string> without(state_->lost.begin(), state_->lost.end());
    without.insert(without.end(), failed.lost.begin(), failed.lost.end());
    without.push_back(failed.name);
    const auto found = run.newest(fallback, without);
    if (!found) return std::nullopt;
    Chosen chosen{found->step, found->name, failed.lost};
    if (!stands) return chosen;
    chosen.lost.push_back(failed.name);
    log(LogLevel::kWarning,
        fmt::format("{} is damaged ({}); the run continues from {}, so what it did in {} is lost, "
                    "in {}",
                    failed.name, problem, found->name, counted(failed.step - found->step, "step"),
                    run.location().describe()));
    return chosen;
  };
  return decode_choice(
      decided_by_rank_0(comm, kChoice, deadline, [&] { return encode_choice(decide()); }));
}

void ManagedRun::restored(const Chosen& chosen) {
  state_->lost.insert(chosen.lost.begin(), chosen.lost.end());
  state_->last = chosen.step;
  state_->is_last_saved = false;
  state_->begun = nullptr;
  state_->before = nullptr;
}

}  // namespace tilestone
