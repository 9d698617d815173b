// Calls of the library by Python threads.
//
// A long call (save, load, verify, a large read) does its work on a thread of its own. The thread
// that called waits for it without the GIL and meanwhile does all that belongs to Python: it runs
// the call's callbacks, hands the library's messages to logging, and every 50 ms lets Python's
// signal handlers run. So callbacks find the thread that they expect (torch's modes, the current
// device), and Ctrl-C ends a callback that sleeps as it ends any other Python code. What a handler,
// a callback or a logger raises ends the work, and then comes out of the call as it is.
//
// A short call runs on the calling thread, without the GIL.
//
// When the interpreter ends, calls of other threads are ended first, so that none is caught taking
// the GIL of an interpreter that is gone.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "tilestone/tilestone.h"

namespace tilestone::python {

namespace nb = nanobind;

// A Python exception on its way through the library; what() is "ValueError: its text". At the end
// of a binding it becomes that exception again: the same object, with traceback and cause.
class Raised : public std::exception {
 public:
  explicit Raised(const nb::python_error& raised);  // with the GIL held
  const char* what() const noexcept override { return text_.c_str(); }

  nb::object exception() const;   // with the GIL held, as all below
  bool ends_the_program() const;  // KeyboardInterrupt, SystemExit: no subclass of Exception
  void add_note(const std::string& note) const;  // does nothing before Python 3.11
  // A failure of the library that it replaces becomes its __context__.
  void came_during(const std::exception_ptr& failure) const;
  void restore() const;  // makes it Python's current error

 private:
  std::shared_ptr<const void> exception_;
  std::string text_;
};

// The GIL for a thread of the library. Not valid once the interpreter has ended: the thread must
// then do without.
class TakenGil {
 public:
  TakenGil();
  ~TakenGil();
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;
  bool valid() const { return valid_; }

 private:
  bool valid_ = false;
  PyGILState_STATE state_{};
};

// While it lives, the end of the interpreter waits for this thread (but not for ever). Made with
// the GIL held; raises SystemExit in a thread that calls the library once the interpreter ends.
class Entered {
 public:
  Entered();
  ~Entered();
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
};

struct WithoutGil {
  enum Length { kLong, kShort };
};

using Stop = std::shared_ptr<const Interrupt>;  // what ends a call early
using CallWork = std::function<void(const Stop&)>;

// Runs `work` without the GIL, as described above; with the GIL held. A short call's interrupt is
// null.
void call_library(WithoutGil::Length length, const CallWork& work);
// A long call that is one of several parts of one work, which `interrupt` stops.
void call_library(const CallWork& work, std::shared_ptr<Interrupt> interrupt);

// The same for work with or without a parameter, and with a result.
template <typename Work>
auto without_gil(Work&& work, WithoutGil::Length length = WithoutGil::kLong) {
  const auto run = [&](const Stop& stop) {
    if constexpr (std::is_invocable_v<Work&, const Stop&>) {
      return work(stop);
    } else {
      static_cast<void>(stop);
      return work();
    }
  };
  using Result = std::invoke_result_t<decltype(run), const Stop&>;
  if constexpr (std::is_void_v<Result>) {
    call_library(length, run);
  } else {
    std::optional<Result> result;
    call_library(length, [&](const Stop& stop) { result.emplace(run(stop)); });
    return *std::move(result);
  }
}

// Runs Python code with the GIL held: on the thread whose call the calling thread works for, or
// here where there is none. Throws what it throws, which must be no nb::python_error. Error
// (kInterrupted) once the interpreter has ended.
void run_in_python(const std::function<void()>& work);

// Gives a reference back, from any thread, without waiting for the GIL: who holds it may be waiting
// for this thread. Without it the reference goes soon after, on a thread of Python.
void drop_reference(PyObject* object);

// A message of the library: to the call that the thread works for, or to the next one that looks.
void post_message(LogLevel level, std::string_view text);

// Python's `atexit` calls it with the GIL held.
void end_all_calls();

// For threads that are stuck in a call of torch at exit. When such a call returns while the
// interpreter ends, Python unwinds the thread, and a destructor of torch or pybind11 that stands in
// the way ends the process ("terminate called without an active exception"). From now on every
// thread but the calling one waits at that place until the process ends by itself.
void leave_threads_behind();

}  // namespace tilestone::python
