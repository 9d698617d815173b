// A fixed set of worker threads. One pool per engine, sized by option. A child of fork gets threads
// of its own.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace tilestone {

class ThreadPool {
 public:
  // threads >= 1. The workers start now and stop in the destructor, after the queue has drained.
  // Error(kIo) where the system starts no more threads; no worker is left then.
  explicit ThreadPool(size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t size() const;

  // Runs body(0) ... body(count - 1), the calling thread helping, and returns when all that were
  // started have ended. After the first exception no further index is started and that exception
  // is rethrown here. May be called from several threads, and from inside a body. The
  // bodies work for the caller's call (base/call_scope.h).
  void parallel_for(size_t count, const std::function<void(size_t)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
