#include "tilestone/storage/keep_trial_internal.h"

#include <algorithm>
#include <limits>

namespace tilestone {
namespace {

constexpr uint64_t kLeastWindow = 64u << 20;  // bytes
constexpr uint64_t kOfWorker = 16u << 20;     // bytes of a window for each worker: two blocks

}  // namespace

KeepTrial::KeepTrial(size_t workers) : window_(std::max(kLeastWindow, workers * kOfWorker)) {}

void KeepTrial::measured(uint64_t cold, uint64_t bytes, double seconds) {
  if (cold < bytes / 8 * 7) return;
  rates_.push_back(static_cast<double>(bytes) / std::max(seconds, 1e-9));
}

std::optional<bool> KeepTrial::verdict() const {
  double fastest_keep = 0;
  double slowest_bypass = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < rates_.size(); ++i) {
    if (i % 2 == 0) fastest_keep = std::max(fastest_keep, rates_[i]);
    if (i % 2 == 1) slowest_bypass = std::min(slowest_bypass, rates_[i]);
  }
  if (slowest_bypass < kClearly * fastest_keep) return true;
  if (rates_.size() < kWindows) return std::nullopt;
  return false;
}

}  // namespace tilestone
