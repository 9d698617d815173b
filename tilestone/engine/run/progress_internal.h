// Reports the progress of a long operation to a user's function, at a limited rate.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

// add() may be called from any thread. One thread at a time calls the user's function, about ten
// times a second; what it throws leaves add() or finish().
class ProgressMeter {
 public:
  ProgressMeter(ProgressFn fn, std::string phase, uint64_t bytes_total);

  void add(uint64_t bytes);
  void finish();  // makes the last call of the function
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;
  void report(Clock::time_point now);

  const ProgressFn fn_;
  const std::string phase_;
  const uint64_t total_;
  const Clock::time_point began_ = Clock::now();
  std::mutex mutex_;
  uint64_t done_ = 0;
  Clock::time_point last_ = began_;
};

}  // namespace tilestone::engine
