// What tests of calls share: communicators that watch or delay the notices of ranks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/relay_testing.h"

namespace tilestone {

inline Deadline plenty() { return Deadline::after(std::chrono::seconds(60)); }

// A communicator whose notices go through post() and newest(). Everything else goes straight
// through.
class RelayedCalls : public RelayComm, protected CallPort {
 public:
  using RelayComm::RelayComm;
  CallPort* call_port() override { return this; }

 protected:
  void post(std::vector<Notice> notices, Deadline deadline) override {
    comm_.call_port()->post(std::move(notices), deadline);
  }
  std::vector<Notice> newest(Deadline deadline, Deadline limit) override {
    return comm_.call_port()->newest(deadline, limit);
  }
  uint64_t last_operation() const override { return comm_.call_port()->last_operation(); }
  void enter(uint64_t call) override { comm_.call_port()->enter(call); }
  void abort(const Error& why) override { comm_.call_port()->abort(why); }
  void leave() override { comm_.call_port()->leave(); }
  CallMemory& memory() override { return comm_.call_port()->memory(); }
};

// Something that threads wait for.
class Event {
 public:
  void set() {
    is_set_ = true;
    is_set_.notify_all();
  }
  void wait() const { is_set_.wait(false); }

 private:
  std::atomic<bool> is_set_ = false;
};

// Delivers each notice after a delay. A later notice never overtakes an earlier one.
class SlowLink final : public RelayedCalls {
 public:
  // next_delay() is asked for each notice.
  SlowLink(Communicator comm, std::function<std::chrono::milliseconds()> next_delay)
      : RelayedCalls(std::move(comm)), next_delay_(std::move(next_delay)) {}

  // Until everything that was posted is delivered.
  void wait() {
    std::unique_lock lock(mutex_);
    delivered_.wait(lock, [this] { return queue_.empty(); });
  }

 private:
  using Time = std::chrono::steady_clock::time_point;

  void post(std::vector<Notice> notices, Deadline) override {
    const std::lock_guard lock(mutex_);
    last_ = std::max(last_, std::chrono::steady_clock::now() + next_delay_());
    queue_.emplace_back(last_, std::move(notices));
    posted_.notify_one();
  }

  void deliver(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (posted_.wait(lock, stop, [this] { return !queue_.empty(); })) {
      const Time due = queue_.front().first;
      if (std::chrono::steady_clock::now() < due) {
        posted_.wait_until(lock, stop, due, [] { return false; });
        continue;
      }
      comm_.call_port()->post(std::move(queue_.front().second), plenty());
      queue_.pop_front();
      delivered_.notify_all();
    }
  }

  const std::function<std::chrono::milliseconds()> next_delay_;
  std::mutex mutex_;
  std::condition_variable_any posted_, delivered_;
  std::deque<std::pair<Time, std::vector<Notice>>> queue_;  // by the time of delivery
  Time last_;
  std::jthread deliverer_{[this](const std::stop_token& stop) { deliver(stop); }};
};

}  // namespace tilestone
