#include "tilestone/base/interrupt.h"

#include <utility>

namespace tilestone {

void Interrupt::request(std::exception_ptr why) {
  const std::lock_guard lock(mutex_);
  if (why_ != nullptr) return;
  why_ = std::move(why);
  requested_.store(true, std::memory_order_release);
}

void Interrupt::check() const {
  if (!requested()) return;
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(why_);
}

}  // namespace tilestone
