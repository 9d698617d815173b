#include "tilestone/base/deadline.h"

#include <utility>

namespace tilestone {

void Interrupt::request(std::exception_ptr why) {
  const std::lock_guard lock(mutex_);
  if (why_ != nullptr) return;
  why_ = std::move(why);
  requested_.store(true, std::memory_order_release);
}

void Interrupt::follow(std::shared_ptr<const Interrupt> other) {
  const std::lock_guard lock(mutex_);
  followed_ = std::move(other);
  follows_.store(followed_ != nullptr, std::memory_order_release);
}

std::shared_ptr<const Interrupt> Interrupt::followed() const {
  if (!follows_.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(mutex_);
  return followed_;
}

bool Interrupt::requested() const {
  if (requested_.load(std::memory_order_acquire)) return true;
  const auto other = followed();
  return other != nullptr && other->requested();
}

void Interrupt::check() const {
  if (requested_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(why_);
  }
  if (const auto other = followed()) other->check();
}

}  // namespace tilestone
