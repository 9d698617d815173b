// A request from outside to end work early: Ctrl-C, or an exception from a callback.
//
// The code that starts the work owns the Interrupt and attaches it to the work's Deadline
// (Deadline::with_interrupt). Everything that waits or loops checks its deadline. After a request
// the work ends by throwing the reason of the request.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

namespace tilestone {

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

}  // namespace tilestone
