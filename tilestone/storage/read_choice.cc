#include "tilestone/storage/posix_internal.h"

namespace tilestone {

void ReadChoice::begin(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::kDone) return;
  if (phase_ != Phase::kCached) {
    if (direct_under_way_ > 0) return;
    // If an earlier batch was too short to finish the trial, the trial starts again.
    phase_ = bytes >= kWorthTrying ? Phase::kDirect : Phase::kUntried;
  }
  bytes_ = 0;
  since_.reset();
}

bool ReadChoice::pick_direct() {
  std::lock_guard lock(mutex_);
  return phase_ != Phase::kDraining && phase_ != Phase::kCached;
}

void ReadChoice::started(bool direct, double now) {
  std::lock_guard lock(mutex_);
  if (direct) ++direct_under_way_;
  if (!since_.has_value()) since_ = now;
}

void ReadChoice::finished(uint64_t bytes, bool direct, double now) {
  std::lock_guard lock(mutex_);
  if (direct) --direct_under_way_;
  const double time = now - since_.value_or(now);
  if (phase_ == Phase::kDirect && direct) {
    bytes_ += bytes;
    if (bytes_ < kWindow || time <= 0) return;
    direct_rate_ = static_cast<double>(bytes_) / time;
    phase_ = Phase::kDraining;
  }
  // The page cache is timed only after the last direct read has finished, because direct reads
  // would share the disk with it.
  if (phase_ == Phase::kDraining && direct_under_way_ == 0) {
    phase_ = Phase::kCached;
    bytes_ = 0;
    since_ = now;
    return;
  }
  if (phase_ != Phase::kCached || direct) return;
  bytes_ += bytes;
  if (time * direct_rate_ * kClearly >= static_cast<double>(kWindow)) {
    phase_ = Phase::kDone;  // not clearly faster than direct reads
  } else if (bytes_ >= kWindow) {
    bytes_ = 0;
    since_ = now;
  }
}

}  // namespace tilestone
