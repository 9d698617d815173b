#include <algorithm>
#include <utility>

#include "tilestone/engine/training_run/pruning_internal.h"

namespace tilestone::engine {

void Pruning::after(uint64_t saved) {
  {
    const std::lock_guard lock(mutex_);
    saved_.push_back(saved);
  }
  worker_.post([this] { prune(); });
}

void Pruning::prune() {
  std::vector<uint64_t> saved;
  {
    const std::lock_guard lock(mutex_);
    saved.swap(saved_);
  }
  if (saved.empty()) return;  // an earlier pruning has taken it
  std::erase_if(known_, [&](const auto& each) {
    return std::ranges::find(saved, each.second.step) != saved.end();
  });
  if (keep_) run_.prune(saved.back(), *keep_, known_);  // logs its failures
  if (!keep_) run_.note(saved.back());
}

}  // namespace tilestone::engine
