#include "tilestone/storage/posix_internal.h"

namespace tilestone {

void ReadChoice::begin(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::kDone || direct_under_way_ > 0) return;
  // A trial that an earlier batch was too short for starts again.
  phase_ = bytes >= kWorthTrying ? Phase::kArmed : Phase::kUntried;
}

bool ReadChoice::pick_direct() {
  std::lock_guard lock(mutex_);
  const bool trying_cache = phase_ == Phase::kDraining || phase_ == Phase::kCached;
  return !(trying_cache || cached_is_faster_);
}

void ReadChoice::started(bool direct, double now) {
  std::lock_guard lock(mutex_);
  if (!direct) return;
  ++direct_under_way_;
  if (phase_ != Phase::kArmed) return;
  phase_ = Phase::kDirect;
  bytes_ = 0;
  since_ = now;
}

void ReadChoice::finished(uint64_t bytes, bool direct, double now) {
  std::lock_guard lock(mutex_);
  if (direct) --direct_under_way_;
  if (phase_ == Phase::kDirect && direct) {
    bytes_ += bytes;
    if (bytes_ < kWindow || now <= since_) return;
    direct_rate_ = static_cast<double>(bytes_) / (now - since_);
    phase_ = Phase::kDraining;
  }
  // The cache is timed once no direct read shares the disk with it any more.
  if (phase_ == Phase::kDraining && direct_under_way_ == 0) {
    phase_ = Phase::kCached;
    bytes_ = 0;
    since_ = now;
    return;
  }
  if (phase_ != Phase::kCached || direct) return;
  bytes_ += bytes;
  const bool late = (now - since_) * direct_rate_ * kClearly >= static_cast<double>(kWindow);
  if (bytes_ < kWindow && !late) return;
  cached_is_faster_ = !late;
  phase_ = Phase::kDone;
}

}  // namespace tilestone
