#include "tilestone/engine/run/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tilestone/base/call_scope.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/run/pending_internal.h"

namespace tilestone {
namespace {

void call(const std::function<void()>& callback) noexcept {
  try {
    callback();
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, std::string("a callback of a save failed: ") + error.what());
  } catch (...) {
    log(LogLevel::kWarning, "a callback of a save failed");
  }
}

}  // namespace

bool Pending::State::end(std::exception_ptr failure) {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    if (done_) return false;
    done_ = true;
    failure_ = std::move(failure);
    callbacks = std::exchange(callbacks_, {});
  }
  changed_.notify_all();
  for (const auto& callback : callbacks) call(callback);
  return true;
}

bool Pending::State::done() {
  if (limit_.expired()) {
    end(std::make_exception_ptr(
        Error(ErrorCode::kTimeout, what_ + " has not ended, though its time is over")
            .with_hint("the storage does not answer; the checkpoint that was at the location "
                       "before still stands unless the new one appears there later")));
  }
  const std::lock_guard lock(mutex_);
  return done_;
}

void Pending::State::expect_other_thread() {
  if (CallScope::current().step != this || done()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "a callback of " + what_ + " waits for that save itself, which would never end")
      .with_hint("in a callback, note only what is to be done, and wait elsewhere");
}

bool Pending::State::wait(Deadline deadline) {
  expect_other_thread();
  while (!done() && !deadline.expired()) {
    std::unique_lock lock(mutex_);
    const auto time = std::min(deadline.wait_time(), limit_.wait_time());
    changed_.wait_for(lock, time, [&] { return done_; });
  }
  return done();
}

void Pending::State::on_done(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done_) return callbacks_.push_back(std::move(callback));
  }
  call(callback);
}

std::exception_ptr Pending::State::failure(bool asked) {
  const std::lock_guard lock(mutex_);
  asked_ = asked_ || asked;
  return failure_;
}

bool Pending::State::was_asked() const {
  const std::lock_guard lock(mutex_);
  return asked_;
}

namespace {

Pending::State& own(const std::shared_ptr<Pending::State>& state) {
  if (state->belongs_here()) return *state;
  throw Error(ErrorCode::kUnsupported,
              state->what() + " belongs to the process that this one was forked from")
      .with_hint("ask for its result in the parent");
}

}  // namespace

bool Pending::done() const { return own(state_).done(); }
bool Pending::wait(Deadline deadline) const { return own(state_).wait(std::move(deadline)); }
void Pending::on_done(std::function<void()> callback) const {
  own(state_).on_done(std::move(callback));
}

void Pending::get(Deadline deadline, double timeout) const {
  State& state = own(state_);
  if (!state.wait(std::move(deadline))) {
    throw Error(ErrorCode::kTimeout,
                fmt::format("{} has not ended after {:g} s", state.what(), timeout))
        .with_hint("it goes on; ask again later");
  }
  const std::exception_ptr failure = state.failure(true);
  if (failure == nullptr) return;
  try {
    std::rethrow_exception(failure);
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
