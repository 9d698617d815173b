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

// Loads what `wanted` asks for into the ranks of options.comm, whatever the sharding of the
// checkpoint. Every rank calls. Tensors that have data are filled in place, others are allocated;
// values and objects come from the checkpoint. Returns a state dict with the structure of `wanted`.
// If any rank fails, every rank throws the same Error, which names that rank; tensors may then be
// partly filled. If another save replaces the checkpoint during the load, the result is the old
// state, the new state, or Error(kNotFound) with a hint that says so. A checkpoint that has only
// lost a data file is kCorrupt.
StateDict load(const StateDict& wanted, const Location& location, const LoadOptions& options = {});

// Loads everything that the checkpoint holds, without a template: each rank gets all of it in new
// memory. Items with a recorded path are nested as they were saved (dicts by text, lists by index);
// the others are at the top level under their keys. Each rank may call this or load(), as it needs.
StateDict load_all(const Location& location, const LoadOptions& options = {});

// One rank's request to load.
struct LoadRequest {
  std::optional<StateDict> wanted;  // nullopt: load everything, as load_all()
  Location location;
  LoadOptions options;  // its comm is ignored
};

// One rank's result of a load.
struct LoadResult {
  StateDict state;
  LoadReport report;
  KeptLeaves kept;  // leaves of this rank's template
};

// The same, if making the request or accepting the result may fail on a single rank. `prepare` runs
// inside the first round and `take` inside the last one. If either throws on one rank, every rank
// throws. The load ends by `deadline`. Either all ranks call this function or all call one of those
// above. `place`: as in save().
void load(const std::function<LoadRequest()>& prepare, const std::function<void(LoadResult)>& take,
          const std::string& place, const Communicator& comm, Deadline deadline);

}  // namespace tilestone
