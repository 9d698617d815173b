#include "tilestone/engine/exchange/rounds_ahead_internal.h"

#include <utility>

#include "tilestone/base/call_scope.h"

namespace tilestone::engine {
namespace {

constexpr size_t kMaxAhead = 3;  // rounds

}  // namespace

RoundsAhead::RoundsAhead(std::function<bool()> more, std::function<std::vector<Bytes>()> make)
    : more_(std::move(more)),
      make_(std::move(make)),
      call_(CallScope::current()),
      thread_([this] { run(); }) {}

RoundsAhead::~RoundsAhead() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void RoundsAhead::run() {
  const CallScope scope(call_);
  std::exception_ptr failure;
  try {
    while (more_()) {
      std::vector<Bytes> round = make_();
      std::unique_lock lock(mutex_);
      rounds_.push_back(std::move(round));
      changed_.notify_all();
      changed_.wait(lock, [&] { return stopped_ || rounds_.size() < kMaxAhead; });
      if (stopped_) return;
    }
  } catch (...) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  failure_ = failure;
  ended_ = true;
  changed_.notify_all();
}

std::vector<Bytes> RoundsAhead::take() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ || !rounds_.empty(); });
  if (rounds_.empty()) {
    if (failure_) std::rethrow_exception(failure_);
    return make_();
  }
  std::vector<Bytes> round = std::move(rounds_.front());
  rounds_.pop_front();
  changed_.notify_all();
  return round;
}

}  // namespace tilestone::engine
