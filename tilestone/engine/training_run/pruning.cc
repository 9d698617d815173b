#include <utility>

#include "tilestone/engine/training_run/pruning_internal.h"

namespace tilestone::engine {

Pruning::~Pruning() {
  end();
  if (thread_.joinable()) thread_.join();
}

void Pruning::end() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  wait();
}

void Pruning::after(uint64_t saved) {
  {
    const std::lock_guard lock(mutex_);
    if (ends_) return;
    asked_ = saved;
    saved_.insert(saved);
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  }
  changed_.notify_all();
}

void Pruning::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !busy_ && !asked_; });
}

void Pruning::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return asked_ || ends_; });
    if (!asked_) return;
    const uint64_t saved = *std::exchange(asked_, std::nullopt);
    const std::set<uint64_t> again = std::exchange(saved_, {});
    busy_ = true;
    lock.unlock();
    std::erase_if(known_, [&](const auto& each) { return again.contains(each.second.step); });
    if (keep_) run_.prune(saved, *keep_, known_);  // logs its failures
    if (!keep_) run_.note(saved);
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace tilestone::engine
