#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/kept_leaves.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Loads what `wanted` asks for into the ranks of options.comm, however the checkpoint was sharded;
// every rank calls. Tensors that have data are filled in place, others are allocated; values and
// objects come from the checkpoint. Returns a state dict of wanted's structure. On failure every
// rank throws the same Error, naming the rank that failed; tensors may then be partly filled.
// When another save replaces the checkpoint meanwhile: the old state, the new one, or
// Error(kNotFound) with a hint that says so.
// `report`, where given, gets what LoadOptions::not_in_checkpoint and its siblings report.
StateDict load(const StateDict& wanted, const Location& location, const LoadOptions& options = {},
               LoadReport* report = nullptr);

// All that the checkpoint holds, without a template: each rank gets everything, in fresh memory.
// What has a recorded path is nested as it was saved (dicts by text, lists by index), what has none
// stands under its key at the top. Ranks call this or load(), each as it needs.
StateDict load_all(const Location& location, const LoadOptions& options = {});

// What a rank brings to a load.
struct LoadRequest {
  std::optional<StateDict> wanted;  // nullopt: as load_all
  Location location;
  LoadOptions options;  // its comm is not looked at
};

// What a rank gets.
struct LoadResult {
  StateDict state;
  LoadReport report;
  KeptLeaves kept;  // this rank's
};

// The same for a rank whose request may fail to be made, or which may fail to take what was loaded:
// `prepare` runs inside the first round and `take` inside the last one, and what they throw is this
// rank's failure, which every rank throws. The load ends by `deadline`. All ranks call this
// function or all the one above. `place`: as for a save.
void load(const std::function<LoadRequest()>& prepare, const std::function<void(LoadResult)>& take,
          const std::string& place, const Communicator& comm, Deadline deadline);

}  // namespace tilestone
