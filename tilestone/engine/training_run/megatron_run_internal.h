// Megatron's policy for a run's directory: the names of its folders, the tracker file, which
// checkpoint a run resumes from, and which ones a new one replaces. How a folder is looked at and
// removed is RunDirectory's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

inline constexpr const char* kMegatronTracker = "latest_checkpointed_iteration.txt";

// A checkpoint as the tracker names it: by its iteration, or "release", which counts as 0.
struct MegatronStep {
  uint64_t iteration = 0;
  bool release = false;

  std::string name() const;  // of its folder: "iter_0000100" or "release"
  friend bool operator==(const MegatronStep&, const MegatronStep&) = default;
};

// Error(kInvalidArgument) if the location is a checkpoint, and no run's directory as well.
void expect_run(const Location& location);

// What a tracker file names. Error(kNotFound): there is no such file; kCorrupt: it holds neither an
// iteration nor "release"; kIo: it can't be read.
MegatronStep read_megatron_tracker(const Location& run, const std::string& name = kMegatronTracker);

// Why a run can't resume from a checkpoint: kCorrupt: it is damaged, kNotFound: it was not
// published. nullopt: it can, as far as a look shows (look_internal.h); a load finds lost data
// files. Error(kUnsupported): it is in Megatron's legacy format, or in an unknown one.
std::optional<Error> megatron_problem(const Location& run, const MegatronStep& step);

// Where a run looks for its checkpoint.
struct MegatronPlaces {
  std::optional<Location> load = std::nullopt;
  std::optional<Location> non_persistent = std::nullopt;
  std::optional<Location> pretrained = std::nullopt;  // from which a new run starts
  std::optional<uint64_t> iteration = std::nullopt;   // nullopt: the latest
};

struct MegatronChoice {
  enum class From : uint8_t { kLoad, kNonPersistent, kPretrained };
  MegatronStep step;
  From from = From::kLoad;
};

// The checkpoint to resume from; nullopt: there is none. The tracker names it; where that fails,
// the newest valid one is taken, with a warning. Error(kNotFound), kCorrupt: the wanted iteration
// can't be loaded, or there is a tracker or a damaged checkpoint but none that can be;
// kInvalidArgument: `load` is itself a checkpoint.
std::optional<MegatronChoice> choose_megatron_step(const MegatronPlaces& places);

// Names a published checkpoint in the tracker, in one step. Returns the folders that it replaces:
// all others of iterations if `only_newest`, else the one that the tracker named before, unless
// that is newer or a multiple of `interval`. 0: none is replaced.
std::vector<std::string> move_megatron_tracker(const Location& run, const MegatronStep& saved,
                                               uint64_t interval, bool only_newest);

// Removes these folders as RunDirectory::remove() does, and what removals that were killed have
// left. Keeps one that is not published, and one that the tracker names again. Failures are logged.
void remove_megatron_steps(const Location& run, const std::vector<std::string>& names);

}  // namespace tilestone::engine
