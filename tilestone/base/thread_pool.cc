// Each parallel_for is a Batch: a counter from which the workers and the caller take indices. The
// queue holds batches that want help. A caller takes indices itself until none is left, and then
// waits only for indices that a worker has already taken. So a nested call ends even if every
// worker is busy or waiting in a nested call of its own.
#include "tilestone/base/thread_pool.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/call_scope.h"
#include "tilestone/base/error.h"
#include "tilestone/base/per_process.h"

namespace tilestone {
namespace {

// Shared by the caller and the workers. A worker may take a batch from the queue after parallel_for
// has returned. It then finds no index left and does not touch the body, which may be gone.
class Batch {
 public:
  Batch(size_t count, const std::function<void(size_t)>& body) : count_(count), body_(&body) {}

  // Takes indices until none is left.
  void work() {
    const CallScope scope(call_);
    for (;;) {
      const size_t index = take();
      if (index == count_) return;
      std::exception_ptr error;
      try {
        (*body_)(index);
      } catch (...) {
        error = std::current_exception();
      }
      finish(std::move(error));
    }
  }

  // Waits until every index that was taken has ended; rethrows the first exception.
  void wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return running_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  size_t take() {
    const std::lock_guard lock(mutex_);
    if (next_ == count_) return count_;
    ++running_;
    return next_++;
  }

  void finish(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error) {
      if (!error_) error_ = std::move(error);
      next_ = count_;
    }
    if (--running_ == 0) ended_.notify_all();
  }

  const size_t count_;
  const std::function<void(size_t)>* const body_;
  void* const call_ = CallScope::current();  // the call scope of parallel_for's caller
  std::mutex mutex_;
  std::condition_variable ended_;
  size_t next_ = 0;     // the next index to hand out; count_: none is left
  size_t running_ = 0;  // number of indices handed out and not ended
  std::exception_ptr error_;
};

// The threads and their queue.
struct Workers {
  std::mutex mutex;
  std::condition_variable work;
  std::deque<std::shared_ptr<Batch>> queue;
  bool stopping = false;
  std::vector<std::thread> threads;

  explicit Workers(size_t count) {
    try {
      for (size_t i = 0; i < count; ++i) threads.emplace_back([this] { run(); });
    } catch (const std::system_error& error) {
      const size_t started = threads.size();
      stop();
      throw Error(ErrorCode::kIo, "only " + std::to_string(started) + " of " +
                                      std::to_string(count) + " threads could be started")
          .with_errno(error.code().value())
          .with_hint("use fewer threads, or raise the limits of this process");
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Workers() { stop(); }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      const std::shared_ptr<Batch> batch = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      batch->work();
      lock.lock();
    }
  }

  void enqueue(const std::shared_ptr<Batch>& batch, size_t helpers) {
    {
      const std::lock_guard lock(mutex);
      queue.insert(queue.end(), helpers, batch);
    }
    for (size_t i = 0; i < helpers; ++i) work.notify_one();
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    work.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
};

}  // namespace

struct ThreadPool::State {
  explicit State(size_t count)
      : size(count), workers([count] { return std::make_unique<Workers>(count); }) {}
  const size_t size;
  const PerProcess<Workers> workers;
};

ThreadPool::ThreadPool(size_t threads) {
  if (threads == 0) {
    throw Error(ErrorCode::kInvalidArgument, "a thread pool needs at least 1 thread, not 0");
  }
  state_ = std::make_unique<State>(threads);
}

ThreadPool::~ThreadPool() = default;

size_t ThreadPool::size() const { return state_->size; }

void ThreadPool::parallel_for(size_t count, const std::function<void(size_t)>& body) {
  if (count == 0) return;
  const auto batch = std::make_shared<Batch>(count, body);
  state_->workers->enqueue(batch, std::min(size(), count - 1));
  batch->work();
  batch->wait();
}

}  // namespace tilestone
