// How long the steps of a save or load take on one rank.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/engine/run/options.h"
#include "tilestone/plan/receipt.h"

namespace tilestone::engine {

// A save or load that fails has no use for its times, so a step that throws is not added.
class StepTimes {
 public:
  using Clock = std::chrono::steady_clock;

  // For the log, which has a line for each step: "save ID, rank 3".
  void set_name(std::string name) { name_ = std::move(name); }
  // A step that ends now.
  void add(std::string_view step, Clock::time_point began);
  // A step that has ended before this one was made. 0 seconds are not added.
  void add_earlier(std::string_view step, double seconds);

  const std::vector<StepTime>& all() const { return steps_; }
  double seconds() const;  // of all steps
  // "planning 0.010 s, writing 2.00 s"
  std::string text() const;
  // What the rank's receipt says of them.
  const std::vector<Receipt::Step>& reported() const { return reported_; }

 private:
  std::string name_;
  std::vector<StepTime> steps_;
  std::vector<Receipt::Step> reported_;
};

// Says in the log that a save or load has ended: for people on the coordinator, on the other ranks
// for those who look for one that is slow. `done`: "saved PLACE". `bytes`: of all ranks if they are
// known, which `by` says: "on 8 ranks".
void log_ended(const StepTimes& steps, std::string_view done, uint64_t bytes, std::string_view by,
               bool coordinator);

}  // namespace tilestone::engine
