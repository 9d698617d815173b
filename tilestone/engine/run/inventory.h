// What a checkpoint holds, as far as a later checkpoint of the same run is compared with it: so
// that a save that has lost something says so.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/base/error.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/value.h"

namespace tilestone {

namespace engine {
class HostStep;
}  // namespace engine

struct Inventory {
  struct Tensor {
    DType dtype = DType::kFloat32;
    Dims shape = {};
    std::set<int> writers = {};  // the ranks that wrote chunks of it; empty: not known
  };
  std::map<std::string, Tensor> tensors = {};
  std::set<std::string> objects = {};
  std::set<std::string> empty_dicts = {};  // their paths, dotted
  // Bytes of tensors that each rank wrote, by rank; empty if not known.
  std::vector<uint64_t> bytes = {};

  bool is_empty() const { return tensors.empty() && objects.empty() && empty_dicts.empty(); }
};

// `files`: the names of the data files that each rank wrote, by rank; empty if not known.
Inventory inventory_of(const Metadata& metadata,
                       std::span<const std::vector<std::string>> files = {});

// Adds the leaves of a common state, as "common_state.PATH". A list is a leaf unless it holds
// dicts, lists or tensors.
void add_common(Inventory& inventory, const Value& common);

// What `before` holds and `now` lacks, as sentences without a full stop that name keys and ranks;
// at most a few keys of each kind are named. Empty if nothing is lost. A loss is:
// - a key that is missing, also one of an empty dict; each may have become a container meanwhile;
// - a tensor with fewer bytes, because its shape or its dtype changed;
// - a tensor that every rank had written a part of, and that now one rank alone has written, if as
//   many ranks save as before: ranks may have put values of their own under one key.
// If there is a loss, ranks that wrote fewer bytes than before are named too.
std::vector<std::string> losses(const Inventory& before, const Inventory& now);

class Location;

// What a CheckpointManager adds to a save. Except for `reuse`, only the coordinator's counts.
struct RunStep {
  std::map<std::string, std::string> attributes = {};  // added to SaveOptions::attributes
  std::string name = {};                               // of this step, for messages: "step 100"
  std::shared_ptr<const Inventory> before = nullptr;   // what to compare with; null: nothing
  std::string before_name = {};
  bool strict = false;  // a loss is Error(kMismatch), before the checkpoint exists; else a warning
  // The folder of another name that holds a durable checkpoint of this step; "": none. Without
  // SaveOptions::overwrite the save is then refused.
  std::string exists_as = {};
  std::optional<Error> refused = {};  // why the step can't be saved; every rank gets it
  // The checkpoint at the location, if there is one, is of a branch that the run has abandoned: it
  // is replaced, as with SaveOptions::overwrite.
  bool replaces = false;
  // The step before, where SaveOptions::reuse names none; null: nothing is reused.
  std::shared_ptr<const Location> reuse = nullptr;
  // The step is saved to a fast tier first (engine/save/on_hosts_internal.h); set on every rank.
  std::shared_ptr<engine::HostStep> hosts = nullptr;
  Inventory now = {};        // receives what the save holds, once the checkpoint exists
  std::string save_id = {};  // receives its save id then
};

// Compares what the step holds with the step before. Throws, or logs a warning.
void compare_with_before(const RunStep& step, const Inventory& now);

}  // namespace tilestone
