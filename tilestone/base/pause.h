// Waiting between two looks for something that another process does.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "tilestone/base/deadline.h"

namespace tilestone {

// Returns after `time` or at the deadline, whichever is first. If the deadline's interrupt is
// requested, throws its reason.
inline void pause(std::chrono::duration<double> time, Deadline deadline) {
  const Deadline end = Deadline::after(time);
  while (!end.expired() && !deadline.expired()) {
    std::this_thread::sleep_for(std::min(end.remaining(), deadline.wait_time()));
  }
}

// Pauses that become longer. What all processes of a world look for, they look for the less often
// the larger the world is, so that together they make at most some thousand requests a second.
class Pauses {
 public:
  explicit Pauses(int world) : longest_(std::max(1.0, world / kManyProcesses) * kLongest) {}
  std::chrono::duration<double> longest() const { return longest_; }
  void next(const Deadline& deadline) {
    pause(std::min(wait_, std::chrono::duration<double>(deadline.remaining())), deadline);
    wait_ = std::min(1.5 * wait_, longest_);
  }

 private:
  static constexpr double kManyProcesses = 256;
  static constexpr std::chrono::duration<double> kLongest{0.05};

  const std::chrono::duration<double> longest_;
  std::chrono::duration<double> wait_{0.001};
};

}  // namespace tilestone
