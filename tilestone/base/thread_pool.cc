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
    const CallScope scope(worked_for_);
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
  const WorkedFor worked_for_ = CallScope::current();  // by parallel_for's caller
  std::mutex mutex_;
  std::condition_variable ended_;
  size_t next_ = 0;     // the next index to hand out; count_: none is left
  size_t running_ = 0;  // number of indices handed out and not ended
  std::exception_ptr error_;
};

// The threads and their queue.
class Workers {
 public:
  explicit Workers(size_t most) : most_(most) {}
  ~Workers() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // If a thread can't be started, throws, and nothing has been queued.
  void enqueue(const std::shared_ptr<Batch>& batch, size_t helpers) {
    {
      const std::lock_guard lock(mutex_);
      while (threads_.size() < most_ && idle_ + starting_ < queue_.size() + helpers) start();
      queue_.insert(queue_.end(), helpers, batch);
    }
    for (size_t i = 0; i < helpers; ++i) work_.notify_one();
  }

 private:
  void start() {
    try {
      threads_.emplace_back([this] { run(); });
      ++starting_;
    } catch (const std::system_error& error) {
      throw Error(ErrorCode::kIo, "only " + std::to_string(threads_.size()) + " of " +
                                      std::to_string(most_) + " more threads could be started")
          .with_errno(error.code().value())
          .with_hint("use fewer threads, or raise the limits of this process");
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    --starting_;
    for (;;) {
      ++idle_;
      work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      --idle_;
      if (queue_.empty()) return;
      const std::shared_ptr<Batch> batch = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      batch->work();
      lock.lock();
    }
  }

  const size_t most_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::shared_ptr<Batch>> queue_;
  size_t idle_ = 0;      // number of threads that wait for work
  size_t starting_ = 0;  // number of threads that have not begun to wait yet
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

struct ThreadPool::State {
  explicit State(size_t threads)
      : size(threads), workers([threads] { return std::make_unique<Workers>(threads - 1); }) {}
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
  if (const size_t helpers = std::min(size(), count) - 1; helpers > 0) {
    state_->workers->enqueue(batch, helpers);
  }
  batch->work();
  batch->wait();
}

}  // namespace tilestone
