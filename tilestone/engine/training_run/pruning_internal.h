// What follows a save, in the background, so that it never delays a training step: the step's hint,
// and pruning.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::engine {

// Thread-safe. Its thread starts with the first pruning. The destructor waits for what was begun
// and what was asked for.
class Pruning {
 public:
  // nullopt: nothing is pruned.
  Pruning(RunDirectory run, std::optional<Keep> keep)
      : run_(std::move(run)), keep_(std::move(keep)) {}
  ~Pruning();
  Pruning(const Pruning&) = delete;
  Pruning& operator=(const Pruning&) = delete;

  // Begins soon, once for the newest of the steps that were given, which are looked at again.
  void after(uint64_t saved);
  void wait();  // until nothing is done and nothing was asked for
  void end();   // the same; from then on nothing is done

 private:
  void serve();

  const RunDirectory run_;
  const std::optional<Keep> keep_;
  std::map<std::string, StepInfo> known_;  // used by the thread only
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<uint64_t> asked_;
  std::set<uint64_t> saved_;  // that were given since the last pruning
  bool busy_ = false;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace tilestone::engine
