// A point in time by which a call must have ended, and the interrupt that may end it earlier.
// Passed down by value. A call that waits does so in a loop: it waits for wait_time() at most, asks
// expired(), and throws Error(kTimeout) when that is true.
#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "tilestone/base/interrupt.h"

namespace tilestone {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline never() { return Deadline(Clock::time_point::max()); }
  static Deadline after(std::chrono::duration<double> time);  // <= 0: already expired

  bool is_never() const { return when_ == Clock::time_point::max(); }
  // Throws the reason of the interrupt, once it was requested.
  bool expired() const;
  // 0 when expired; a day when never, so that the result can always be waited for in a loop.
  std::chrono::nanoseconds remaining() const;
  // How long one wait may last: remaining(), but 50 ms at most where an interrupt may come.
  std::chrono::nanoseconds wait_time() const;
  Clock::time_point when() const { return when_; }
  // The deadline after `fraction` (0..1) of the remaining time: what a coordinator grants its
  // peers, so that it has time left to report to the others who is missing.
  Deadline sooner(double fraction) const;

  // The same time; expired() and wait_time() heed the interrupt. Null: none.
  Deadline with_interrupt(std::shared_ptr<const Interrupt> interrupt) const;
  // The same time without the interrupt: for what must be done after it was requested.
  Deadline without_interrupt() const { return Deadline(when_); }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
  std::shared_ptr<const Interrupt> interrupt_;
};

}  // namespace tilestone
