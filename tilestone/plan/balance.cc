#include <algorithm>
#include <functional>

#include "tilestone/geometry/box.h"
#include "tilestone/plan/balance_internal.h"

namespace tilestone {
namespace {

const auto kMoreLoaded = [](const auto& a, const auto& b) { return b < a; };

}  // namespace

HolderBalance::HolderBalance(std::span<const int> holders) : holders_(holders) {
  const auto size = static_cast<int64_t>(holders.size());
  start_ = hash_of(Dims{holders.front(), holders.back(), size}) % holders.size();
}

int HolderBalance::give(uint64_t bytes) {
  Load least;
  if (loads_.size() < holders_.size()) {
    least.turn = loads_.size();  // holders that own nothing come first, in rotation order
  } else {
    std::pop_heap(loads_.begin(), loads_.end(), kMoreLoaded);
    least = loads_.back();
    loads_.pop_back();
  }
  least.bytes += bytes;
  loads_.push_back(least);
  std::push_heap(loads_.begin(), loads_.end(), kMoreLoaded);
  return holders_[(start_ + least.turn) % holders_.size()];
}

}  // namespace tilestone
