// A point in time by which a call must have ended. Passed down by value; a call that waits asks
// for remaining() and throws Error(kTimeout) once expired().
#pragma once

#include <chrono>

namespace tilestone {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline never() { return Deadline(Clock::time_point::max()); }
  static Deadline after(std::chrono::duration<double> time);  // <= 0: already expired

  bool is_never() const { return when_ == Clock::time_point::max(); }
  bool expired() const { return !is_never() && Clock::now() >= when_; }
  // 0 when expired; a day when never, so that the result can always be waited for in a loop.
  std::chrono::nanoseconds remaining() const;
  Clock::time_point when() const { return when_; }
  // The deadline after `fraction` (0..1) of the remaining time: what a coordinator grants its
  // peers, so that it has time left to tell the others who is missing.
  Deadline sooner(double fraction) const;

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

}  // namespace tilestone
