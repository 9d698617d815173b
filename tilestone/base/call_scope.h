// The call of the library that a thread works for, so that whoever calls back into the user's code
// knows on whose behalf. Threads of a pool take it over from the caller of parallel_for.
#pragma once

namespace tilestone {

// While it lives, this thread works for `call`, which means something only to whoever put it there
// (the Python binding) and outlives the scope; null: for nobody.
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
