#include "tilestone/base/deadline.h"

#include <algorithm>

namespace tilestone {
namespace {

using std::chrono::nanoseconds;
using Seconds = std::chrono::duration<double>;

// A longer time counts as never, so adding a time to now() can't overflow.
constexpr Seconds kLongest = std::chrono::hours(24 * 365 * 100);
constexpr nanoseconds kInterruptPoll = std::chrono::milliseconds(50);

}  // namespace

Deadline Deadline::after(std::chrono::duration<double> time) {
  if (time >= kLongest) return never();
  const Clock::time_point now = Clock::now();
  // With this form of the condition, NaN counts as expired too.
  if (!(time > Seconds::zero())) return Deadline(now);
  return Deadline(now + std::chrono::duration_cast<Clock::duration>(time));
}

bool Deadline::expired() const {
  if (interrupt_ != nullptr) interrupt_->check();
  return !is_never() && Clock::now() >= when_;
}

nanoseconds Deadline::remaining() const {
  if (is_never()) return std::chrono::hours(24);
  return std::max(nanoseconds(0), std::chrono::duration_cast<nanoseconds>(when_ - Clock::now()));
}

nanoseconds Deadline::wait_time() const {
  return interrupt_ == nullptr ? remaining() : std::min(remaining(), kInterruptPoll);
}

Deadline Deadline::sooner(double fraction) const {
  if (is_never()) return *this;
  return after(Seconds(remaining()) * fraction).with_interrupt(interrupt_);
}

Deadline Deadline::with_interrupt(std::shared_ptr<const Interrupt> interrupt) const {
  Deadline deadline(when_);
  deadline.interrupt_ = std::move(interrupt);
  return deadline;
}

}  // namespace tilestone
