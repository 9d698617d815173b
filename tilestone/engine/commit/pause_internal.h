// Waiting between two looks at a directory.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "tilestone/base/deadline.h"

namespace tilestone::engine {

// Returns after `time` or at the deadline, whichever is first. If the deadline's interrupt is
// requested, throws its reason.
inline void pause(std::chrono::duration<double> time, Deadline deadline) {
  const Deadline end = Deadline::after(time);
  while (!end.expired() && !deadline.expired()) {
    std::this_thread::sleep_for(std::min(end.remaining(), deadline.wait_time()));
  }
}

}  // namespace tilestone::engine
