// What follows a save, in the background, so that it never delays a training step: the step's hint,
// and pruning.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/engine/run/worker_internal.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::engine {

// Thread-safe. The destructor waits for what was begun and what was asked for.
class Pruning {
 public:
  // nullopt: nothing is pruned.
  Pruning(RunDirectory run, std::optional<Keep> keep)
      : run_(std::move(run)), keep_(std::move(keep)) {}

  // Begins soon, once for the newest of the steps that were given, which are looked at again.
  void after(uint64_t saved);
  void wait() { worker_.wait(); }  // until nothing is done and nothing was asked for
  void end() { worker_.end(); }    // the same; from then on nothing is done

 private:
  void prune();

  const RunDirectory run_;
  const std::optional<Keep> keep_;
  std::map<std::string, StepInfo> known_;  // used by the thread only
  std::mutex mutex_;                       // guards saved_
  std::vector<uint64_t> saved_;            // that were given since the last pruning
  Worker worker_;                          // last: it uses the others
};

}  // namespace tilestone::engine
