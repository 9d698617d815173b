// Deltas of states that ranks hold in memory. The ranks meet in rounds, as for a save: a failure of
// one is thrown by all.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/delta/sums_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save/request_internal.h"

namespace tilestone::engine {

struct DeltaCall {
  Communicator comm;
  std::string location;  // Location::identity_or_empty()
  Deadline deadline;
};

// A version of a state, as far as this rank writes it: in host memory, for the next delta.
struct DeltaBase {
  struct Part {
    TensorView memory;
    uint32_t portion = 0;  // of its tensor's CRC-32
  };
  std::map<std::pair<std::string, Box>, Part> parts = {};
  std::string id = {};                  // state_id() of the version
  std::vector<TensorSum> tensors = {};  // of the version; only on the coordinator
};

// Writes the folder of the request with what has changed since the base, and makes `base` the
// state. `from`: the base is read there first. Until the folder has its index, which is written
// last, it is no delta; after a failure before that `base` is what it was, after one after it
// empty. Throws Error(kMismatch), naming the
// key, if base and state have other tensors, or this rank's parts are other boxes than when the
// base was made; Error(kInvalidArgument) for objects; Error(kAlreadyExists) if a delta is there;
// Error(kMismatch) too if the folder is version-N and the version before it, which is there, is
// not the base; and what a save's planning and writing throw. `writes` false: only makes `base` the
// state, whose id is then known.
DeltaReport save_delta(const DeltaCall& call, const MadeRequest& request, DeltaBase& base,
                       const std::optional<Location>& from, bool writes);

// Changes the tensors of the state in place. `made`: of this rank, or why it has none. `deltas`:
// the newest first; each leads to the base of the one before it, and those before a break in this
// chain are not looked at. The tensors of all ranks must be those of the base of one of them, or
// those of the newest version already, which is checked before any is changed: Error(kMismatch), or
// with `may_be_other` nullopt, unless there is a break. Returns what the newest delta holds.
// Throws Error(kCorrupt) if something else than the newest version comes out.
std::optional<DeltaReport> apply_in_place(const DeltaCall& call,
                                          const std::variant<const StateDict*, Error>& made,
                                          const std::vector<Location>& deltas,
                                          const OpenOptions& options, bool may_be_other);

}  // namespace tilestone::engine
