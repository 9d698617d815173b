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
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/session.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

struct Listing;

// A step and its checkpoint's save id ("": not known).
struct StepId {
  uint64_t step = 0;
  std::string save_id = {};
  friend bool operator==(const StepId&, const StepId&) = default;
};

// Where a step stands in the history of its run. Stored as attributes of its checkpoint
// (docs/formats/manifest.md).
struct Lineage {
  // The run's id. "": saved without one, by an earlier version or by another program. All steps
  // without an id count as one run, which is older than any other.
  std::string run = {};
  uint64_t ordinal = 0;  // one more than the highest in the directory when the save began
  std::optional<StepId> parent = std::nullopt;   // the step that it continues
  std::optional<uint64_t> after = std::nullopt;  // the step without an id that the run continues
  friend bool operator==(const Lineage&, const Lineage&) = default;
};
std::map<std::string, std::string> to_attributes(const Lineage& lineage);
// What can't be read counts as absent.
Lineage lineage_of(const std::map<std::string, std::string>& attributes);

inline constexpr const char* kOlderRun = "older";  // how the run without an id is called
std::string run_name(const Lineage& lineage);      // the run's id, or kOlderRun

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
  std::string name;                          // the name of its folder
  StepState state = StepState::kUnfinished;  // "durable", "unfinished", "damaged" or "foreign"
  std::string problem = {};                  // why it is not durable, as a clause; "" if it is
  bool is_saved_to = false;                  // a save, a repair or a removal is under way there
  bool is_link = false;                      // the folder is a symbolic link; it is never pruned
  std::string format = {};   // "torch_dist"; "" if there is no checkpoint that can be read
  std::string dialect = {};  // "pytorch"
  std::string writer = {};   // the program that saved it: "Tilestone 0.1.0"
  uint64_t bytes = 0;        // of all its files
  std::optional<double> time =
      std::nullopt;  // when it was saved, in seconds since 1970; null: not known
  std::map<std::string, double> metrics = {};  // what was given to CheckpointManager::save
  std::string save_id = {};                    // the id of its save; "": not known
  Lineage lineage = {};
  std::string hint = {};  // the file in the run's directory that says all this; "": there is none
};

// The lines of a run's directory, and which steps are kept. Pure functions: they see no storage.

// A step and the steps that it continues, the newest first, as far as they are known.
using Line = std::vector<const StepInfo*>;

// The step that a run continues from: the one with the highest ordinal; of steps without, the one
// with the highest number. Of equal ones the last. nullptr if there is none.
const StepInfo* tip_of(std::span<const StepInfo> steps);
// The line that ends with `tip`, which need not be among the steps. If a parent is gone, the line
// goes on with the newest older step of the same run that does not have a higher number.
Line line_of(std::span<const StepInfo> steps, const StepInfo& tip);
bool is_on(const Line& line, const StepInfo& step);
// Whether the run of the line has left the step behind when it went back to an earlier one.
bool is_abandoned(const StepInfo& step, const Line& line);
// The steps that are not on the line and have a higher number than its newest one, the highest
// first.
std::vector<const StepInfo*> steps_beside(std::span<const StepInfo> steps, const Line& line);

// Error(kInvalidArgument), naming the field, for last == 0, best->count == 0, an empty name of a
// metric, and a newer_than that is negative or NaN.
void check_keep(const Keep& keep);

// The steps that are not kept once `saved` is durable, in the order of `durable`: of the line that
// ends with it those that no rule keeps; and those that its run has abandoned, once the line has
// `keep.last` newer ones. Steps of other runs are kept. `now`: seconds since 1970.
std::vector<const StepInfo*> steps_to_prune(std::span<const StepInfo> durable,
                                            const StepInfo& saved, const Keep& keep, double now);

// The best of the steps first, at most `best.count`. Of two equal ones the newer is better.
std::vector<uint64_t> best_steps(const Line& steps, const Best& best);

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

// What became of a step that was to be removed.
enum class Removed : uint8_t {
  kNow,
  kByOther,  // another process has removed it, or is doing so
  kNot,      // it is a link or in use, or can't be removed; logged
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
  // For the looks of one call: see Storage::until().
  RunDirectory until(const Deadline& deadline) const;

  // The folders that steps have, ascending by step; of two with the same step, the one that the
  // pattern names comes last. Opens no checkpoint. None if there is no directory.
  std::vector<StepInfo> list(Listing* listed = nullptr) const;
  // The same with save id and lineage, as hints say (hints.cc), or else the heads of the manifests.
  // `state` is kDamaged if one can't be read; otherwise it is not known.
  std::vector<StepInfo> list_lineages() const;
  // The same, with everything that the checkpoints say. Those with hints are not opened.
  std::vector<StepInfo> steps() const;
  // What the folder of a step holds.
  StepInfo look(const StepInfo& listed) const;
  std::optional<StepInfo> find(uint64_t step) const;  // nullopt: it has no folder

  // The newest durable step of the line with the highest ordinal (tip_of); nullopt if there is no
  // step. Unfinished and foreign steps are skipped, which is logged. If the newest one is damaged,
  // that is an error, kCorrupt or what opening it throws; or with `fallback` the step that it
  // continues is taken, with a warning. `damaged`: names of steps that are known to be damaged.
  // `lost`: receives the names of others.
  std::optional<StepInfo> newest(bool fallback = false,
                                 const std::vector<std::string>& damaged = {},
                                 std::vector<std::string>* lost = nullptr) const;

  // The same without an error for damaged steps, and without logging what is skipped. A hint is
  // believed, as in steps().
  std::optional<uint64_t> latest() const;
  // The best durable step of that line; nullopt if none has the metric.
  std::optional<uint64_t> best(const Best& best) const;

  // Removes the checkpoint of a step and its folder. A mark in the folder, put in one step, says
  // that there is no checkpoint any more; then the files go, the index first. So after a crash
  // there is either the checkpoint, or a leftover that gc knows. A process that reads the
  // checkpoint gets an error. `may_go`: asked under the folder's lock; false: it stays.
  Removed remove(const std::string& name,
                 const std::function<bool(Storage& folder)>& may_go = nullptr) const;
  // The same, unless the step was saved anew since it was looked at, which is logged.
  Removed remove(const StepInfo& seen) const;
  // Ends removals of steps that were killed, also the hidden folders that older builds have left.
  void end_removals() const;
  // Removes what pruning and saves that were killed have left: what end_removals() ends, and the
  // files of unfinished steps below `below`, and their folders. What somebody uses stays. Failures
  // are logged.
  void remove_remains(uint64_t below) const;
  // Leaves the hint of a step that was saved. Failures are logged.
  void note(uint64_t saved) const;
  // The same. Then removes the durable steps that `keep` does not keep (steps_to_prune), and
  // remains, and in kept steps that are not in `known` what a save that was killed had replaced.
  // Does nothing, with a warning, unless `saved` is durable. Failures are logged. Returns the
  // removed steps. `known`: what looks at durable steps have found, by name; filled, so that each
  // checkpoint is looked at once.
  std::vector<uint64_t> prune(uint64_t saved, const Keep& keep,
                              std::map<std::string, StepInfo>& known) const;

  // The leftovers of all steps; the names begin with the step's folder.
  std::vector<Leftover> find_leftovers(bool force = false) const;
  std::vector<Leftover> remove_leftovers(bool force = false) const;

 private:
  friend std::optional<std::vector<StepInfo>> steps_of_run(const RunDirectory& run);

  using Known = std::map<std::string, StepInfo>;
  // What two listings show.
  struct Contents {
    std::vector<StepInfo> steps;     // of those with hints, what these say
    std::vector<std::string> idle;   // hints that say nothing: their steps are gone
    std::vector<std::string> files;  // of the directory itself
    std::set<std::string> hidden;    // names of steps with hidden folders
  };
  Contents contents() const;
  std::vector<StepInfo> steps_among(const Listing& listed) const;
  StepInfo noted(uint64_t saved, Contents& here) const;
  std::vector<StepInfo> durable_steps(Contents& here, Known& known) const;
  std::vector<const StepInfo*> superseded(std::vector<StepInfo>& durable, const std::string& newest,
                                          const Keep& keep, Known& known) const;
  using MayRemove = std::function<bool(Storage& folder, std::span<const std::string> names)>;
  Removed remove_hinted(const std::string& name, const std::string& hint,
                        const MayRemove& may_go) const;
  std::vector<Leftover> leftovers(bool remove, bool force) const;
  bool is_removed(const std::string& name) const;
  void end_removals(const Contents& here) const;
  void remove_remains(const Contents& here, uint64_t below) const;
  void remove_unfinished(const std::string& name) const;
  void remove_replaced(const std::string& name) const;

  Location location_;
  StepNames names_;
};

// Whether the directory holds steps and is not a checkpoint itself.
bool is_run_directory(const RunDirectory& run);
// RunDirectory::steps(), if it is one.
std::optional<std::vector<StepInfo>> steps_of_run(const RunDirectory& run);

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
  bool reuse = false;                       // ManagerOptions::reuse
  // Steps are saved to a fast tier (engine/fast_tier) first, so that a save looks at the directory
  // only as long as it knows nothing of it: a directory that hangs does not stop the training.
  bool on_hosts = false;
};

// One rank's view of a run. With a communicator, all ranks make the same calls; those that
// communicate take it as an argument. Used by one thread at a time.
class ManagedRun {
 public:
  // Error(kInvalidArgument) for options that are out of range.
  ManagedRun(Location location, RunOptions options);
  // Error(kMismatch) on every rank, naming ranks, if they don't see the same steps in the
  // directory, also when they look again, or if `terms`, names and values, are not equal.
  void expect_same_steps(const Communicator& comm, Deadline deadline,
                         const std::vector<std::pair<std::string, std::string>>& terms = {}) const;
  ~ManagedRun();  // waits for the pruning that is under way
  ManagedRun(ManagedRun&& other) noexcept;
  ManagedRun& operator=(ManagedRun&& other) noexcept;

  const RunDirectory& directory() const;
  bool is_due(uint64_t step) const;
  bool is_saved(uint64_t step) const;  // by this object, and since then no other step

  // The deadline of a part of a call that communicates, from its beginning.
  using Limit = std::function<Deadline()>;
  // What a save does that is not a run's matter. Every rank has both.
  struct SaveWork {
    // Of the state from the checkpoint in a folder (engine::difference_from_saved); "": none.
    std::function<std::string(const std::string& folder)> difference;
    // Saves the state into a folder, with SaveOptions::step. Throws if the save has failed, or if
    // in the background, if it could not begin.
    std::function<void(const std::string& folder, std::shared_ptr<RunStep> begun)> write;
    // On rank 0, with RunOptions::on_hosts, of a step without a difference that is not in the
    // directory: its metrics, if it is saved once more all the same.
    std::function<std::optional<std::map<std::string, double>>()> once_more = {};
  };
  // Saves a step, if it is due or with `force`; false: it is not due. Every rank calls, once the
  // save before has ended.
  // If the step was saved or restored last and is durable, it is settled: without a difference
  // rank 0's metrics are added to it and nothing is written; with one, that is
  // Error(kAlreadyExists), or with `overwrite` it is saved. If the restored run has lost the step
  // to damage, rank 0 first removes what is left of it. Rank 0 reads what the step before holds, at
  // the first save and after a restore; a failure of that is logged.
  bool save(const Communicator& comm, uint64_t step, const std::map<std::string, double>& metrics,
            bool force, bool overwrite, const Limit& limit, const SaveWork& work);
  // The last of these steps did not become durable.
  void failed();
  // Once the step is durable: rank 0 leaves its hint and prunes, in a thread of its own. Returns at
  // once. May be called from any thread.
  void prune_after(uint64_t step);
  // Waits until nothing is being pruned.
  void wait();
  // The same; from then on nothing is pruned.
  void end();

  // Chooses the step to restore, as rank 0 sees it, the same on every rank, loads it, and returns
  // it; the next save continues it. nullopt: there is none. `step`: this one, or else the newest
  // durable one. `load` loads what is in a folder; if something is missing or damaged there, it
  // throws that on every rank. Then another one is chosen, unless the step was named: if it was
  // removed meanwhile, the newest of those that are left; if it is damaged, with `fallback` only,
  // the one before, of which rank 0 warns. Every rank throws what expect_same_steps() throws, what
  // RunDirectory::newest() throws on rank 0, or if a wanted step is not durable, kNotFound or why
  // it is damaged.
  using Load = std::function<void(uint64_t step, const std::string& folder)>;
  std::optional<uint64_t> restore(const Communicator& comm, std::optional<uint64_t> step,
                                  bool fallback, const Limit& limit, const Load& load);
  // With a fast tier: the state of this step, which need not be in the directory, was loaded; the
  // next save continues it. `others`: steps that may be elsewhere than in the directory.
  void continue_from(const StepInfo& step, std::vector<StepInfo> others);
  // The next save's ordinal is higher than this one.
  void note_ordinal(uint64_t ordinal);

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
  // What the step before has, the one that was saved or restored last, is not written again:
  // SaveOptions::reuse.
  bool reuse = false;
  // For all saves. comm, by_files and step are not used. With `overwrite` a durable step can be
  // saved again; one of a branch that the run has left can be anyway.
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
  // Error(kInvalidArgument) for options that are out of range. Throws what Session and
  // ManagedRun::expect_same_steps throw.
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
  // Loads the newest durable step of the line that was saved last (tip_of), which rank 0 chooses
  // for all, or the given one. The next save continues it; a manager that has restored nothing
  // begins a new run. Unfinished steps are skipped. If the newest step is damaged, which may show
  // only as it is loaded, every rank throws, or with `fallback` the one before is loaded.
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
