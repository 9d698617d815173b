#include "tilestone/engine/training_run/checkpoint_manager.h"

#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/agree.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone {
namespace {

RunOptions run_options(const ManagerOptions& options) {
  return {options.every, options.keep, options.name, options.strict, options.reuse};
}

}  // namespace

CheckpointManager::CheckpointManager(Location run, ManagerOptions options)
    : options_(std::move(options)),
      run_(std::move(run), run_options(options_)),
      session_(options_.comm, options_.saving.timeout) {
  const Deadline deadline = engine::deadline_of(options_.saving);
  const auto say = [&](int, const Bytes&) {
    engine::check_options(options_.saving);
    return Bytes();
  };
  agree(options_.comm, "options of a manager", deadline, say,
        [](int, std::vector<Bytes>) { return Decision{Bytes(), true}; });
  run_.expect_same_steps(options_.comm, deadline);
}

bool CheckpointManager::should_save(uint64_t step) const {
  return run_.is_due(step) && !run_.is_saved(step);
}

bool CheckpointManager::save(uint64_t step, const StateDict& state,
                             const std::map<std::string, double>& metrics, bool force) {
  SaveOptions options = options_.saving;
  const auto limit = [&] { return engine::deadline_of(options); };
  const auto difference = [&](const std::string& folder) {
    const Location location = run_.directory().at(folder);
    return engine::OfSession::difference(session_, location, options, limit(),
                                         engine::RequestView{&state, &location, &options});
  };
  const auto write = [&](const std::string& folder, std::shared_ptr<RunStep> begun) {
    options.step = std::move(begun);
    session_.save(state, run_.directory().at(folder), options);
    run_.prune_after(step);
  };
  return run_.save(options_.comm, step, metrics, force, options.overwrite, limit,
                   {difference, write});
}

CheckpointManager::Restored CheckpointManager::restore(const StateDict& wanted,
                                                       const RestoreOptions& options) {
  Restored restored{wanted, std::nullopt};
  restored.step = run_.restore(
      options_.comm, options.step, options.fallback,
      [&] { return engine::deadline_of(options.loading); },
      [&](uint64_t, const std::string& folder) {
        restored.state = session_.load(wanted, run_.directory().at(folder), options.loading);
      });
  return restored;
}

std::optional<uint64_t> CheckpointManager::latest() const { return run_.directory().latest(); }

std::optional<uint64_t> CheckpointManager::best() const {
  if (!options_.keep || !options_.keep->best) return std::nullopt;
  return run_.directory().best(*options_.keep->best);
}

std::vector<StepInfo> CheckpointManager::steps() const { return run_.directory().steps(); }

void CheckpointManager::wait() { run_.wait(); }

}  // namespace tilestone
