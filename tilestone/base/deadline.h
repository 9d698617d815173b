// A point in time by which a call must end, and the interrupt that may end it earlier. Passed by
// value. A call that waits does so in a loop: it waits for at most wait_time(), calls expired(),
// and throws Error(kTimeout) if that returns true.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace tilestone {

// A request from outside to end work early: Ctrl-C, or an exception from a callback.
//
// The code that starts the work owns the Interrupt and attaches it to the work's Deadline
// (Deadline::with_interrupt). Everything that waits or loops checks its deadline. After a request
// the work ends by throwing the reason of the request.

class Interrupt {
 public:
  // `why` must not be null. Only the first request counts. Any thread may call it; it does not wait
  // for the work to end.
  void request(std::exception_ptr why);

  // From now on a request of `other` counts as one of this interrupt. Null: of no other any more.
  // Only one thread may call this at a time.
  void follow(std::shared_ptr<const Interrupt> other);

  bool requested() const;
  // Throws the reason of the request; returns if there was no request.
  void check() const;

 private:
  std::shared_ptr<const Interrupt> followed() const;

  std::atomic<bool> requested_ = false;
  std::atomic<bool> follows_ = false;
  mutable std::mutex mutex_;  // guards the following
  std::exception_ptr why_;
  std::shared_ptr<const Interrupt> followed_;
};

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline never() { return Deadline(Clock::time_point::max()); }
  static Deadline after(std::chrono::duration<double> time);  // <= 0 or NaN: already expired

  bool is_never() const { return when_ == Clock::time_point::max(); }
  // Whether the time has passed. If the interrupt was requested, throws its reason instead.
  bool expired() const;
  // 0 if expired. One day if is_never(), so that the result is always a valid time to wait.
  std::chrono::nanoseconds remaining() const;
  // How long a single wait may last: remaining(), but at most 50 ms if there is an interrupt.
  std::chrono::nanoseconds wait_time() const;
  Clock::time_point when() const { return when_; }
  // The deadline after `fraction` (0 to 1) of the remaining time. The coordinator waits for its
  // peers until then, so that it has time left to tell the others which ranks are missing.
  Deadline sooner(double fraction) const;

  // The same time with an interrupt, which expired() and wait_time() take into account. Null: none.
  Deadline with_interrupt(std::shared_ptr<const Interrupt> interrupt) const;
  // The same time without the interrupt, for work that must be done even after a request.
  Deadline without_interrupt() const { return Deadline(when_); }
  const std::shared_ptr<const Interrupt>& interrupt() const { return interrupt_; }  // null: none

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
  std::shared_ptr<const Interrupt> interrupt_;
};

}  // namespace tilestone
