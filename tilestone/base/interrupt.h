// A request to end work early, made from outside of it: Ctrl-C, or an exception of a callback.
//
// Whoever starts the work keeps the Interrupt and gives it to the Deadline of the work
// (Deadline::with_interrupt). Everything that waits or loops asks its deadline; the work then ends
// by throwing the reason of the request.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>

namespace tilestone {

class Interrupt {
 public:
  // `why` is not null. The first request counts. From any thread; does not wait for the work.
  void request(std::exception_ptr why);

  bool requested() const { return requested_.load(std::memory_order_acquire); }
  // Throws the reason of the request; returns when there was none.
  void check() const;

 private:
  std::atomic<bool> requested_ = false;
  mutable std::mutex mutex_;
  std::exception_ptr why_;
};

}  // namespace tilestone
