// Records, per thread, for what the thread works. Code that calls back into the user's program can
// look it up. The threads of a pool inherit it from the caller of parallel_for.
#pragma once

namespace tilestone {

struct WorkedFor {
  // The library call; null: none. Only the code that set it (the Python binding) knows its meaning.
  void* call = nullptr;
  // What ends only after this thread's work (Pending::State), so that a wait for it would not end.
  const void* step = nullptr;
};

// While the object exists, this thread works for `what`, which must outlive it.
class CallScope {
 public:
  explicit CallScope(WorkedFor what);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  static WorkedFor current();

 private:
  const WorkedFor before_;
};

}  // namespace tilestone
