// A request from outside to end work early: Ctrl-C, or an exception from a callback.
//
// The code that starts the work owns the Interrupt and attaches it to the work's Deadline
// (Deadline::with_interrupt). Everything that waits or loops checks its deadline. After a request
// the work ends by throwing the reason of the request.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>

namespace tilestone {

class Interrupt {
 public:
  // `why` must not be null. Only the first request counts. Any thread may call it; it does not wait
  // for the work to end.
  void request(std::exception_ptr why);

  bool requested() const { return requested_.load(std::memory_order_acquire); }
  // Throws the reason of the request; returns if there was no request.
  void check() const;

 private:
  std::atomic<bool> requested_ = false;
  mutable std::mutex mutex_;
  std::exception_ptr why_;
};

}  // namespace tilestone
