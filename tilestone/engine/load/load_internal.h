// One rank's part in a load, in two calls, between which the caller takes what was loaded.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// `wanted` asks for states of Megatron-Core's distributed optimizer as "optimizer.state.STATE.KEY",
// whatever their format (engine/read/optimizer_states_internal.h). The common state comes back as
// in the format fully_reshardable, with the param groups of this rank's optimizers.
struct OptimizerRequest {
  std::string place;  // the optimizer's key in the common state
  // JSON as in ConvertOptions::layout_file. `layouts`, or those in a file: of the job that saved.
  // Both "": those in the checkpoint, or else `own`, those of this rank.
  std::string layouts, layout_file;
  std::string own;
};

// What a rank loads, from where and how. The caller owns it for as long as the load lasts.
struct LoadView {
  const StateDict* wanted = nullptr;  // null: everything in the checkpoint
  const Location* location = nullptr;
  const LoadOptions* options = nullptr;  // its comm is ignored
  double preparing = 0;                  // seconds in which the caller made `wanted`
  const OptimizerRequest* optimizer = nullptr;
};
// A rank that can't make its request takes part all the same: its error is its first message.
using MadeLoad = std::variant<LoadView, Error>;

struct LoadResult {
  StateDict state;
  LoadReport report;
  KeptLeaves kept;  // leaves of this rank's template
};

// Every rank makes the same calls. If a rank fails in one of them, every rank throws its error.
class LoadByRounds {
 public:
  // Begins the call; throws what Call throws. `location`: Location::identity_or_empty().
  LoadByRounds(const Communicator& comm, const std::string& location, Deadline deadline);
  // If finish() should have been called, the other ranks end with Error(kInterrupted).
  ~LoadByRounds();
  LoadByRounds(const LoadByRounds&) = delete;
  LoadByRounds& operator=(const LoadByRounds&) = delete;

  // `last`: finish() is not called, because this rank can't fail to take what is loaded.
  LoadResult read(const MadeLoad& request, bool last);
  // Ends the load. `failed`: why this rank could not take what was loaded.
  void finish(const std::optional<Error>& failed);
  // The steps that were taken so far (LoadReport::timings); finish() adds "handing over".
  const std::vector<StepTime>& timings() const;

 private:
  class Loading;
  std::unique_ptr<Loading> loading_;
  bool unfinished_ = false;
};

}  // namespace tilestone::engine
