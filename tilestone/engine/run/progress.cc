#include <utility>

#include "tilestone/engine/run/progress_internal.h"

namespace tilestone::engine {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);

}  // namespace

ProgressMeter::ProgressMeter(ProgressFn fn, std::string phase, uint64_t bytes_total)
    : fn_(std::move(fn)), phase_(std::move(phase)), total_(bytes_total) {}

void ProgressMeter::add(uint64_t bytes) {
  if (!fn_) return;
  std::lock_guard lock(mutex_);
  done_ += bytes;
  const Clock::time_point now = Clock::now();
  if (now - last_ >= kInterval) report(now);
}

void ProgressMeter::finish() {
  if (!fn_) return;
  std::lock_guard lock(mutex_);
  report(Clock::now());
}

double ProgressMeter::seconds() const {
  return std::chrono::duration<double>(Clock::now() - began_).count();
}

void ProgressMeter::report(Clock::time_point now) {
  last_ = now;
  fn_({phase_, done_, total_, std::chrono::duration<double>(now - began_).count()});
}

}  // namespace tilestone::engine
