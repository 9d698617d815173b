// Progress of long work, reported to a user's function no more often than it can use.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

// add() from any thread; the function is called by one at a time, about ten times a second, and
// what it throws comes out of add() or finish().
class ProgressMeter {
 public:
  ProgressMeter(ProgressFn fn, std::string phase, uint64_t bytes_total);

  void add(uint64_t bytes);
  void finish();  // the call at the end
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
