// What CheckpointManager and its counterpart in Python share: which step is restored, what a step
// is compared with, and the pruning in the background.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/keep.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/engine/run_directory.h"

namespace tilestone {

struct RunOptions {
  uint64_t every = 1;                       // a save is due at multiples of it; at least 1
  std::optional<Keep> keep = std::nullopt;  // nullopt: no checkpoint is removed
  std::string name = kStepPattern;          // of a step's folder
  bool strict = false;                      // RunStep::strict
};

// One rank's view of a run. With a communicator, all ranks make the same calls; those that
// communicate take it as an argument. Used by one thread at a time.
class ManagedRun {
 public:
  // Error(kInvalidArgument) for options that are out of range.
  ManagedRun(Location location, RunOptions options);
  ~ManagedRun();  // waits for the pruning that is under way
  ManagedRun(ManagedRun&& other) noexcept;
  ManagedRun& operator=(ManagedRun&& other) noexcept;

  const RunDirectory& directory() const;
  bool is_due(uint64_t step) const;
  bool is_saved(uint64_t step) const;  // by this object, and since then no other step

  // ---- Saving

  // Before a save of a step. Communicates only if the restored run has lost that very step to
  // damage: then rank 0 removes what is left of it, so that it can be saved again.
  void make_room(const Communicator& comm, uint64_t step, Deadline deadline);
  // For SaveOptions::step, once the save before has ended. Rank 0 reads what the step before holds,
  // at the first save and after a restore. A failure of that is logged.
  std::shared_ptr<RunStep> begin(const Communicator& comm, uint64_t step,
                                 const std::map<std::string, double>& metrics);
  // The step is durable or, of a save in the background, staged: it counts as saved.
  void saved(uint64_t step, std::shared_ptr<RunStep> begun);
  // The last of these steps did not become durable.
  void failed();
  // On rank 0, once the step is durable: prunes in a thread of its own. Returns at once. May be
  // called from any thread.
  void prune_after(uint64_t step);
  // Waits until nothing is being pruned.
  void wait();

  // ---- Restoring

  struct Chosen {
    uint64_t step = 0;
    std::string name = {};               // of the folder
    std::vector<std::string> lost = {};  // folders of damaged steps that were skipped
  };
  // The step to restore, as rank 0 sees it; the same on every rank. nullopt: there is none.
  // `step`: this one, or else the newest durable one. Every rank throws what RunDirectory::newest()
  // throws on rank 0, or if a wanted step is not durable, kNotFound or why it is damaged.
  std::optional<Chosen> choose(const Communicator& comm, std::optional<uint64_t> step,
                               bool fallback, Deadline deadline);
  // After a load of a chosen step has failed on every rank because something was missing or
  // damaged (`problem`): the next step to try. nullopt: none, the failure counts. If the step was
  // removed meanwhile, that is the newest of those that are left; if it is damaged, the one before,
  // with `fallback` only, and rank 0 warns.
  std::optional<Chosen> choose_again(const Communicator& comm, const Chosen& failed,
                                     const std::string& problem, bool fallback, Deadline deadline);
  // The state of this step was loaded.
  void restored(const Chosen& chosen);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
