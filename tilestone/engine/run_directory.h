// A run's directory: one folder for each step's checkpoint. What it holds is found from the
// checkpoints themselves. No file that names the newest one is written or believed, because such a
// file can be wrong.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/engine/commit/gc.h"
#include "tilestone/engine/keep.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/engine/run/location.h"

namespace tilestone {

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
  // Removes the durable steps that `keep` does not keep, and remains. Does nothing, with a warning,
  // unless `saved` is durable. Failures are logged. Returns the removed steps. `known`: what looks
  // at durable steps have found, by name; filled, so that each step is looked at once.
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

}  // namespace tilestone
