// A thread that does what it is given, one after the other.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone::engine {

// Thread-safe. If the work uses a communicator, nothing else does, and the ranks give their workers
// the same work in the same order.
class Worker {
 public:
  Worker() = default;
  ~Worker() { end(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Work that logs its own failures. After end() it is not done: false. Not in a forked child.
  bool post(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      if (ends_) return false;
      waiting_.push_back(std::move(work));
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    }
    changed_.notify_all();
    return true;
  }

  // Waits for the work. Throws what it throws; Error(kInterrupted) after end().
  void run(const std::function<void()>& work) {
    const auto task = std::make_shared<std::packaged_task<void()>>(work);
    if (!post([task] { (*task)(); })) {
      throw Error(ErrorCode::kInterrupted, "the manager of the run is closed");
    }
    task->get_future().get();
  }

  // Whether everything is done that was given so far. Not to be called in a forked child.
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return waiting_.empty() && !busy_;
  }

  // Waits until that is so.
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.empty() && !busy_; });
  }

  // Waits for all that was given; from then on nothing is done. In a forked child, nothing.
  void end() {
    if (process_ != ::getpid()) {
      if (thread_.joinable()) new std::thread(std::move(thread_));  // the parent's
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !waiting_.empty() || ends_; });
      if (waiting_.empty()) return;
      const std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      work();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool busy_ = false;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace tilestone::engine
