// CheckpointManager: the checkpoints of a training run in one directory. When to save, what to
// keep, and what to continue from.
//
//   CheckpointManager manager("run", {.comm = comm, .every = 100, .keep = Keep{.last = 3}});
//   auto [state, step] = manager.restore(wanted);
//   for (uint64_t i = step.value_or(0) + 1; i <= last; ++i) {
//     train(...);
//     manager.save(i, state, {{"loss", loss}});
//   }
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/comm/communicator.h"
#include "tilestone/engine/managed_run.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run_directory.h"
#include "tilestone/engine/session.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

struct ManagerOptions {
  Communicator comm = {};                   // default: a group of one
  uint64_t every = 1;                       // a save is due at multiples of it; at least 1
  std::optional<Keep> keep = std::nullopt;  // nullopt: no checkpoint is removed
  std::string name = kStepPattern;          // of a step's folder
  // A save that lacks something that the step before has fails with Error(kMismatch), before the
  // checkpoint exists. Otherwise it is logged. losses() in run/inventory.h says what counts.
  bool strict = false;
  // For all saves. comm, by_files and step are not used. With `overwrite` a durable step can be
  // saved again.
  SaveOptions saving = {};
};

struct RestoreOptions {
  std::optional<uint64_t> step = std::nullopt;  // nullopt: the newest durable one
  // Skips damaged steps, with a warning that says how much is lost, where otherwise the newest one
  // is an error.
  bool fallback = false;
  LoadOptions loading = {};  // comm and own_rank are not used
};

// One rank's manager. All ranks make it, and call save and restore, together; the other functions
// communicate with nobody. One thread may use it at a time.
class CheckpointManager {
 public:
  // Error(kInvalidArgument) for options that are out of range. Throws what Session throws.
  explicit CheckpointManager(Location run, ManagerOptions options = {});

  // Whether save() would save without `force`.
  bool should_save(uint64_t step) const;
  // Saves the state as the step's checkpoint, if a save is due or with `force`; returns whether it
  // did. A step that this manager has just saved is not saved again. Rank 0's metrics count.
  // Afterwards rank 0 removes, in the background, the checkpoints that are not kept. Throws what
  // save() throws.
  bool save(uint64_t step, const StateDict& state,
            const std::map<std::string, double>& metrics = {}, bool force = false);

  struct Restored {
    StateDict state;
    std::optional<uint64_t> step;  // nullopt: there is no checkpoint, and `state` is `wanted`
  };
  // Loads the newest durable step, which rank 0 chooses for all, or the given one. Unfinished steps
  // are skipped. If the newest step is damaged, which may show only as it is loaded, every rank
  // throws, or with `fallback` the one before is loaded.
  Restored restore(const StateDict& wanted, const RestoreOptions& options = {});

  std::optional<uint64_t> latest() const;  // the newest durable step, as this rank sees it
  std::optional<uint64_t> best() const;    // the best durable step by options.keep->best
  std::vector<StepInfo> steps() const;     // all steps, ascending
  const RunDirectory& directory() const { return run_.directory(); }
  void wait();  // until nothing is removed any more

 private:
  ManagerOptions options_;
  ManagedRun run_;
  Session session_;
};

}  // namespace tilestone
