// The other side of Pending: the code that ends the step.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"

namespace tilestone {

// Thread-safe. Nothing of it may be called in a child process of fork() except belongs_here().
struct Pending::State {
 public:
  // `what`: completes "... has not ended": "the save 12ab... at /data". The step counts as failed
  // with Error(kTimeout) once `limit` has passed, even if its thread is stuck in the system.
  State(std::string what, Deadline limit) : what_(std::move(what)), limit_(limit) {}

  bool belongs_here() const { return process_ == ::getpid(); }
  const std::string& what() const { return what_; }

  // Ends the step. Null: well. Returns false, and changes nothing, if it has ended before.
  bool end(std::exception_ptr failure);
  bool done();
  bool wait(Deadline deadline);
  // Error(kInvalidArgument) if this thread works for the step (base/call_scope.h), so that a wait
  // for its end would not end: in a callback of the save. wait() begins with it.
  void expect_other_thread();
  void on_done(std::function<void()> callback);
  // Once it has ended. `asked`: the caller passes the failure on to the user.
  std::exception_ptr failure(bool asked);
  bool was_asked() const;

 private:
  const pid_t process_ = ::getpid();
  const std::string what_;
  const Deadline limit_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool asked_ = false;
  std::exception_ptr failure_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace tilestone
