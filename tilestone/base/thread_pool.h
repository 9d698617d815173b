// A fixed set of worker threads. Each engine has one pool, whose size is an option. A forked child
// gets its own threads.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace tilestone {

class ThreadPool {
 public:
  // threads >= 1, else Error(kInvalidArgument). The constructor starts the workers; the destructor
  // stops them after the queue is empty. Error(kIo) if the system can't start that many threads; no
  // thread is left running then.
  explicit ThreadPool(size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t size() const;

  // Runs body(0) ... body(count - 1) on the workers and the calling thread, and returns when all of
  // them have ended. After the first exception no further index is started, and that exception is
  // rethrown here. May be called from several threads at once and from inside a body. The bodies
  // inherit the caller's CallScope (base/call_scope.h).
  void parallel_for(size_t count, const std::function<void(size_t)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
