// A step of a save that ends on another thread.
#pragma once

#include <functional>
#include <memory>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"

namespace tilestone {

// Copies refer to the same step. Thread-safe. In a child process of fork() a step that has not
// ended still belongs to the parent: every function then throws Error(kUnsupported).
class Pending {
 public:
  struct State;
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Whether the step has ended, well or not.
  bool done() const;
  // Waits until the step has ended or the deadline has passed; returns done(). Throws the reason of
  // the deadline's interrupt.
  bool wait(Deadline deadline = Deadline::never()) const;
  // Waits likewise, then throws the error with which the step has ended, if there is one.
  // Error(kTimeout) if it has not ended after `timeout` seconds; the step goes on.
  void get(double timeout = kNoTimeout) const { get(Deadline::after(Seconds(timeout)), timeout); }
  void get(Deadline deadline, double timeout) const;
  // Calls `callback` when the step has ended: on the thread that ends it, or now on the calling
  // thread. What it throws is logged.
  void on_done(std::function<void()> callback) const;

 private:
  using Seconds = std::chrono::duration<double>;
  std::shared_ptr<State> state_;
};

}  // namespace tilestone
