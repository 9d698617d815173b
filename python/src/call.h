// Calls of the library from Python threads.
//
// A long call (save, load, verify, a large read) does its work on a separate thread. The calling
// thread waits for it without the GIL and meanwhile does everything that belongs to Python: it runs
// the call's callbacks, passes the library's messages to logging, and lets Python's signal handlers
// run every 50 ms. So callbacks run on the thread that they expect (torch's modes, the current
// device), and Ctrl-C ends a sleeping callback like any other Python code. An exception from a
// handler, a callback or a logger ends the work and is then raised from the call unchanged.
//
// A short call runs on the calling thread, without the GIL.
//
// When the interpreter ends, the calls of other threads are ended first, so that no thread takes
// the GIL of an interpreter that no longer exists.
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

// A Python exception that passes through the library; what() is "ValueError: its text". Where the
// call returns to Python it is raised again: the same object, with its traceback and cause.
class Raised : public std::exception {
 public:
  explicit Raised(const nb::python_error& raised);  // needs the GIL
  const char* what() const noexcept override { return text_.c_str(); }

  nb::object exception() const;   // this and all functions below need the GIL
  bool ends_the_program() const;  // KeyboardInterrupt, SystemExit: not a subclass of Exception
  void add_note(const std::string& note) const;  // does nothing before Python 3.11
  void restore() const;                          // sets it as Python's current error

 private:
  std::shared_ptr<const void> exception_;
  std::string text_;
};

// Holds the GIL in a thread of the library. Not valid() once the interpreter has ended: the thread
// then does not hold the GIL.
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

// While it exists, the end of the interpreter waits for this thread, up to a limit. The constructor
// needs the GIL. Once the interpreter is ending, it raises SystemExit in every thread but the one
// that ends the interpreter.
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

using Stop = std::shared_ptr<const Interrupt>;  // ends a call early
using CallWork = std::function<void(const Stop&)>;

// Runs `work` without the GIL, as described above. The caller must hold the GIL. A short call gets
// a null interrupt.
void call_library(WithoutGil::Length length, const CallWork& work);
// A long call that is one of several parts of the same work; `interrupt` stops all parts.
void call_library(const CallWork& work, std::shared_ptr<Interrupt> interrupt);

// The same for work with or without a parameter, with or without a result.
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

// Runs Python code with the GIL held: on the Python thread whose call the current thread works for,
// or on the current thread if there is no such call. Throws what `work` throws, which must not be
// an nb::python_error; Error(kInterrupted) once the interpreter has ended.
void run_in_python(const std::function<void()>& work);
// Likewise, always on the current thread. For work that needs nothing of the caller's thread and
// must not be ended by the exception of a signal handler: these run on Python's main thread only.
void run_in_python_here(const std::function<void()>& work);

// Asks, from any thread, whether the call that the current thread works for is being ended early:
// by an exception of a signal handler, a callback or a logger.
std::function<bool()> ends_early();

// Releases a reference, from any thread. Never waits for the GIL, because the thread that holds it
// may be waiting for this one: without the GIL, a Python thread releases the reference soon after.
void drop_reference(PyObject* object);

// Queues a message of the library for the next call that delivers messages.
void post_message(LogLevel level, std::string_view text);

// Ends the calls of other threads. Python's `atexit` calls it with the GIL held.
void end_all_calls();

// For threads that are stuck in a call of torch at exit. When such a call returns while the
// interpreter ends, Python unwinds the thread, and a destructor of torch or pybind11 on the stack
// then ends the process ("terminate called without an active exception"). From now on every thread
// but the calling one waits at that point until the process ends by itself.
void leave_threads_behind();

}  // namespace tilestone::python
