#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "tilestone/storage/io_queue_internal.h"
#include "tilestone/storage/system_internal.h"

namespace tilestone {
namespace {

// On the measured disks, more threads than this made nothing faster.
constexpr unsigned kMaxThreads = 4;

class ThreadQueue : public IoQueue {
 public:
  // Fewer threads, but at least one, if the system allows no more.
  ThreadQueue(System& system, unsigned threads) : system_(system) {
    threads_.reserve(threads);
    while (threads_.size() < threads) {
      try {
        threads_.emplace_back([this] { work(); });
      } catch (const std::system_error&) {
        if (threads_.empty()) throw;
        break;
      }
    }
  }
  ~ThreadQueue() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      requests_.clear();
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(const IoRequest& request) override {
    {
      std::lock_guard lock(mutex_);
      requests_.push_back(request);
    }
    changed_.notify_one();
  }

  IoResult wait() override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return !results_.empty(); });
    const IoResult result = results_.front();
    results_.pop_front();
    return result;
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stop_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const IoRequest request = requests_.front();
      requests_.pop_front();
      lock.unlock();
      const IoResult result = run(request);
      lock.lock();
      results_.push_back(result);
      finished_.notify_one();
    }
  }

  IoResult run(const IoRequest& request) {
    const ssize_t result = call(request);
    return {request.tag, result < 0 ? -errno : result};
  }

  ssize_t call(const IoRequest& request) {
    switch (request.kind) {
      case IoRequest::Kind::kRead:
        return system_.pread(request.fd, request.data, request.size, request.offset);
      case IoRequest::Kind::kWrite:
        return system_.pwrite(request.fd, request.data, request.size, request.offset);
      case IoRequest::Kind::kPopulate:
        return system_.populate_large_folios(request.fd, request.offset, request.size);
    }
    errno = EINVAL;
    return -1;
  }

  System& system_;
  std::mutex mutex_;
  std::condition_variable changed_, finished_;
  std::deque<IoRequest> requests_;
  std::deque<IoResult> results_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> make_thread_queue(System& system, unsigned depth) {
  return std::make_unique<ThreadQueue>(system, std::clamp(depth, 1u, kMaxThreads));
}

}  // namespace tilestone
