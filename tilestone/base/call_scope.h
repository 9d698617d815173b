// Records, per thread, the library call that the thread works for. Code that calls back into the
// user's program can look it up. The threads of a pool inherit it from the caller of parallel_for.
#pragma once

namespace tilestone {

// While the object exists, this thread works for `call`. Null: for no call. The pointer is opaque:
// only the code that set it (the Python binding) knows its meaning. It must outlive the scope.
class CallScope {
 public:
  explicit CallScope(void* call);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  static void* current();

 private:
  void* const before_;
};

}  // namespace tilestone
