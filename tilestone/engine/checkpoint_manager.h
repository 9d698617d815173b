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

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/session.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Which checkpoints of a run are kept. Pure functions: they see no storage.

// The `count` steps whose metric of this name is the lowest or the highest. Steps without the
// metric, and those where it is NaN, are never among them.
struct Best {
  enum class Mode : uint8_t { kMin, kMax };
  std::string metric;
  Mode mode = Mode::kMin;
  size_t count = 1;
};

// A step is kept if one of these rules keeps it.
struct Keep {
  size_t last = 1;     // the newest ones, at least 1
  uint64_t every = 0;  // steps that are multiples of it; 0: none
  std::optional<Best> best = std::nullopt;
  // Seconds since it was saved. A step of unknown age is kept if this is set.
  std::optional<double> newer_than = std::nullopt;
};
// Error(kInvalidArgument), naming the field, for last == 0, best->count == 0, an empty name of a
// metric, and a newer_than that is negative or NaN.
void check_keep(const Keep& keep);

// What decides whether a step is kept.
struct KeptStep {
  uint64_t step = 0;
  std::map<std::string, double> metrics = {};
  std::optional<double> age = std::nullopt;  // seconds; nullopt: unknown
};

// The steps that no rule keeps, ascending. `durable`: the run's durable steps, in any order.
// `saved`: the step that has just become durable. Only steps below it are pruned: those above it
// are of a run that was abandoned when this one went back, and nothing has replaced them.
std::vector<uint64_t> steps_to_prune(std::span<const KeptStep> durable, uint64_t saved,
                                     const Keep& keep);

// The best of the steps first, at most `best.count`. Of two equal ones the newer is better.
std::vector<uint64_t> best_steps(std::span<const KeptStep> steps, const Best& best);

// A run's directory: one folder for each step's checkpoint. What it holds is found from the
// checkpoints themselves. No file that names the newest one is written or believed, because such a
// file can be wrong.

inline constexpr const char* kStepPattern = "step-{step:08}";

// The names of steps: a pattern with one "{step}" or, padded with zeros, "{step:08}".
class StepNames {
 public:
  // Error(kInvalidArgument) for any other pattern, and for one that begins with a dot or contains a
  // slash.
  explicit StepNames(std::string pattern = kStepPattern);

  std::string name_of(uint64_t step) const;
  // The step that a name denotes: by the pattern, by kStepPattern, and as Megatron ("iter_0000100")
  // and torchtitan ("step-100") name them. nullopt for any other name.
  std::optional<uint64_t> step_of(std::string_view name) const;

 private:
  struct Parts {
    std::string before, after;
    size_t digits = 0;  // at least
    std::string name_of(uint64_t step) const;
    std::optional<uint64_t> step_of(std::string_view name) const;
  };
  static Parts parse(const std::string& pattern);
  std::vector<Parts> known_;  // the first one names new steps
};

enum class StepState : uint8_t {
  kDurable,     // a complete checkpoint: its index can be read, its files exist and are long enough
  kUnfinished,  // no checkpoint yet: it is being saved, or its save ended early
  kDamaged,     // a checkpoint that can't be read, or whose files are missing or cut
  kForeign,     // a checkpoint that Tilestone can't read
};
std::string_view to_string(StepState state);  // "durable", "unfinished", "damaged", "foreign"

// What a step's folder holds. Contents of tensors are not read: Checkpoint::verify() does that.
struct StepInfo {
  uint64_t step = 0;
  std::string name;  // of the folder
  StepState state = StepState::kUnfinished;
  std::string problem = {};  // why it is not durable, as a clause
  bool is_saved_to = false;  // a save, a repair or a removal is under way there
  bool is_link = false;      // the folder is a symbolic link; it is never pruned
  std::string format = {};   // "torch_dist"; "" if there is no checkpoint that can be read
  std::string dialect = {};  // "pytorch"
  std::string writer = {};   // "Tilestone 0.1.0"
  uint64_t bytes = 0;        // of all files
  std::optional<double> time = std::nullopt;  // when it was saved, in seconds since 1970
  std::map<std::string, std::string> attributes = {};
  std::map<std::string, double> metrics = {};  // that were given to CheckpointManager::save
};

// What became of a step that was to be removed.
enum class Removed : uint8_t {
  kNow,
  kByOther,  // another process has removed it, or is doing so
  kNot,      // it is a link or in use, or can't be moved; logged
};

// All functions may be called from any thread, and by several processes and hosts at the same time.
class RunDirectory {
 public:
  explicit RunDirectory(Location location, const std::string& pattern = kStepPattern);

  const Location& location() const { return location_; }
  const StepNames& names() const { return names_; }
  // The folder of a step: the one that exists, else the one that a save makes.
  std::string name_of(uint64_t step) const;
  Location at(const std::string& name) const;

  // The folders that steps have, ascending by step; of two with the same step, the one that the
  // pattern names comes last. Opens no checkpoint. None if there is no directory.
  std::vector<StepInfo> list() const;
  // The same, with everything that the checkpoints say.
  std::vector<StepInfo> steps() const;
  // What the folder of a step holds.
  StepInfo look(const StepInfo& listed) const;
  std::optional<StepInfo> find(uint64_t step) const;  // nullopt: it has no folder

  // The newest durable step; nullopt if there is none. Unfinished and foreign steps above it are
  // skipped, which is logged. A damaged step above it is an error, kCorrupt or what opening it
  // throws, or with `fallback` is skipped with a warning. `without`: names that don't count.
  std::optional<StepInfo> newest(bool fallback = false,
                                 const std::vector<std::string>& without = {}) const;

  // The same without an error for damaged steps, and without logging what is skipped.
  std::optional<uint64_t> latest() const;
  // The best durable step; nullopt if none has the metric.
  std::optional<uint64_t> best(const Best& best) const;

  // Removes the checkpoint of a step: its folder is renamed, in one step, to a hidden name that gc
  // knows (".NAME.tilestone-ID"), and then removed, the index first. So after a crash there is
  // either the checkpoint, or a leftover. A process that reads the checkpoint gets an error.
  Removed remove(const std::string& name) const;
  // Removes what pruning and saves that were killed have left: hidden folders of steps, and the
  // files of unfinished steps below `below`, and their folders. What somebody uses stays. Failures
  // are logged.
  void remove_remains(uint64_t below) const;
  // Removes the durable steps that `keep` does not keep, and remains, and in kept steps that are
  // not in `known` what a save that was killed had replaced. Does nothing, with a warning, unless
  // `saved` is durable. Failures are logged. Returns the removed steps. `known`: what looks at
  // durable steps have found, by name; filled, so that each step is looked at once.
  std::vector<uint64_t> prune(uint64_t saved, const Keep& keep,
                              std::map<std::string, StepInfo>& known) const;

  // The leftovers of all steps; the names begin with the step's folder.
  std::vector<Leftover> find_leftovers(bool force = false) const;
  std::vector<Leftover> remove_leftovers(bool force = false) const;

 private:
  bool stands(const StepInfo& step) const;
  std::vector<StepInfo> durable_steps(std::map<std::string, StepInfo>& known) const;
  std::vector<Leftover> leftovers(bool remove, bool force) const;
  std::set<std::string> hidden() const;
  void remove_unfinished(const std::string& name) const;
  void remove_replaced(const std::string& name) const;

  Location location_;
  StepNames names_;
};

// Whether the directory holds steps and is not a checkpoint itself.
bool is_run_directory(const RunDirectory& run);

// What a durable step holds, for the comparison with a later one.
Inventory inventory_of(const Location& location);

// Metrics as attributes of a checkpoint, and back. Error(kInvalidArgument) for an empty name.
std::map<std::string, std::string> attributes_of(const std::map<std::string, double>& metrics);
std::map<std::string, double> metrics_of(const std::map<std::string, std::string>& attributes);

// What CheckpointManager and its counterpart in Python share: which step is restored, what a step
// is compared with, and the pruning in the background.

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

  // ---- Saving the same step once more

  // Before a save. If the step was saved or restored last: the folder of its durable checkpoint, as
  // rank 0 sees it; "" if it has none (its save has failed). For any other step "", and no
  // message.
  std::string saved_before(const Communicator& comm, uint64_t step, Deadline deadline);
  // `difference`: of the state from that checkpoint (engine::difference_from_saved). If there is
  // none, rank 0's metrics are added to the checkpoint's, and true is returned: the step is saved.
  // Otherwise false with `overwrite`, and without it Error(kAlreadyExists). Every rank calls.
  bool is_settled(const Communicator& comm, uint64_t step, const std::string& folder,
                  const std::string& difference, const std::map<std::string, double>& metrics,
                  bool overwrite, Deadline deadline);

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

  // Whether save() would write without `force`.
  bool should_save(uint64_t step) const;
  // Saves the state as the step's checkpoint, if a save is due or with `force`; false: it is not
  // due. If the step was saved or restored last and its checkpoint holds this state, by its
  // checksums, nothing is written. If it holds another one, that is Error(kAlreadyExists), or with
  // saving.overwrite it is replaced. Rank 0's metrics count, also those of a later call. Afterwards
  // rank 0 removes, in the background, the checkpoints that are not kept. Throws what save()
  // throws.
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
