// Worker threads, each started when there is work for it. A save, a load and an open checkpoint
// have a pool each, whose size is an option. A forked child gets its own threads.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace tilestone {

class ThreadPool {
 public:
  // threads: how many bodies run at once, with those on the calling thread: at least 1, else
  // Error(kInvalidArgument). The destructor stops the workers.
  explicit ThreadPool(size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t size() const;  // what was given to the constructor

  // Runs body(0) ... body(count - 1) on the workers and the calling thread, and returns when all of
  // them have ended. After the first exception no further index is started, and that exception is
  // rethrown here. May be called from several threads at once and from inside a body. The bodies
  // inherit the caller's CallScope (base/call_scope.h). Error(kIo) before any of them if the system
  // can't start the workers that would help; a single body needs none.
  void parallel_for(size_t count, const std::function<void(size_t)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
