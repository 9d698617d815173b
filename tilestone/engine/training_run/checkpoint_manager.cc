#include "tilestone/engine/training_run/checkpoint_manager.h"

#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone {
namespace {

RunOptions run_options(const ManagerOptions& options) {
  return {options.every, options.keep, options.name, options.strict};
}

// Whether a load failed because of what is in the directory, and not of what was asked for: a key
// that an intact checkpoint lacks.
bool is_about_files(const Error& error) {
  if (error.code() == ErrorCode::kNotFound && !error.key().empty() && error.file().empty()) {
    return false;
  }
  return error.code() == ErrorCode::kNotFound || error.code() == ErrorCode::kCorrupt ||
         error.code() == ErrorCode::kUnsafe || error.code() == ErrorCode::kCoverage;
}

}  // namespace

CheckpointManager::CheckpointManager(Location run, ManagerOptions options)
    : options_(std::move(options)),
      run_(std::move(run), run_options(options_)),
      session_(options_.comm, options_.saving.timeout) {
  run_.expect_same_steps(options_.comm, engine::deadline_of(options_.saving));
}

bool CheckpointManager::should_save(uint64_t step) const {
  return run_.is_due(step) && !run_.is_saved(step);
}

bool CheckpointManager::save(uint64_t step, const StateDict& state,
                             const std::map<std::string, double>& metrics, bool force) {
  if (!(force || run_.is_due(step))) return false;
  SaveOptions options = options_.saving;
  const Communicator& comm = options_.comm;
  const std::string folder = run_.saved_before(comm, step, engine::deadline_of(options));
  if (!folder.empty()) {
    const Location location = run_.directory().at(folder);
    const std::string difference =
        engine::OfSession::difference(session_, location, options, engine::deadline_of(options),
                                      engine::RequestView{&state, &location, &options});
    if (run_.is_settled(comm, step, folder, difference, metrics, options.overwrite,
                        engine::deadline_of(options))) {
      return true;
    }
  }
  run_.make_room(comm, step, engine::deadline_of(options));
  options.step = run_.begin(comm, step, metrics);
  session_.save(state, run_.directory().at(run_.directory().names().name_of(step)), options);
  run_.saved(step, options.step);
  if (comm.is_coordinator()) run_.prune_after(step);
  return true;
}

CheckpointManager::Restored CheckpointManager::restore(const StateDict& wanted,
                                                       const RestoreOptions& options) {
  const Deadline deadline = engine::deadline_of(options.loading);
  const Communicator& comm = options_.comm;
  auto chosen = run_.choose(comm, options.step, options.fallback, deadline);
  if (!chosen) return {wanted, std::nullopt};
  for (;;) {
    try {
      StateDict state = session_.load(wanted, run_.directory().at(chosen->name), options.loading);
      run_.restored(*chosen);
      return {std::move(state), chosen->step};
    } catch (const Error& error) {
      if (options.step || !is_about_files(error)) throw;
      const auto next = run_.choose_again(comm, *chosen, error.what(), options.fallback, deadline);
      if (!next) throw;
      chosen = next;
    }
  }
}

std::optional<uint64_t> CheckpointManager::latest() const { return run_.directory().latest(); }

std::optional<uint64_t> CheckpointManager::best() const {
  if (!options_.keep || !options_.keep->best) return std::nullopt;
  return run_.directory().best(*options_.keep->best);
}

std::vector<StepInfo> CheckpointManager::steps() const { return run_.directory().steps(); }

void CheckpointManager::wait() { run_.wait(); }

}  // namespace tilestone
