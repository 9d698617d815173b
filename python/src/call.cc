#include "python/src/call.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

#include "python/src/bindings.h"
#include "tilestone/base/call_scope.h"
#include "tilestone/base/per_process.h"

namespace tilestone::python {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSignalPoll{50};
constexpr milliseconds kExitWait{5000};  // longest wait for other threads at the interpreter's end

// ---- The end of the interpreter ----

class PythonCall;

// Never destroyed, because threads of the library may use it until the end of the process.
struct Process {
  std::mutex mutex;  // guards calls, messages and dropped
  std::set<PythonCall*> calls;
  std::vector<Message> messages;
  std::vector<PyObject*> dropped;  // references to release once a thread has the GIL
  std::atomic<int> entered = 0;    // threads inside the binding
  std::atomic<int> taking = 0;     // threads about to take the GIL
  std::atomic<bool> ending = false;
  std::atomic<bool> ended = false;
  std::atomic<std::thread::id> ending_thread;

  bool is_ending_here() const { return ending_thread.load() == std::this_thread::get_id(); }
  std::vector<PyObject*> take_dropped() {
    std::lock_guard lock(mutex);
    return std::exchange(dropped, {});
  }
  std::vector<Message> take_messages() {
    std::lock_guard lock(mutex);
    return std::exchange(messages, {});
  }
};

// A forked child gets a new one, because it has none of its parent's calls and threads.
Process& process() {
  static const auto* const the_process =
      new PerProcess<Process>([] { return std::make_unique<Process>(); });
  return **the_process;
}

// Needs the GIL. The signature is that of Py_AddPendingCall.
int give_back_dropped(void* = nullptr) {
  for (PyObject* object : process().take_dropped()) Py_DECREF(object);
  return 0;
}

// Calls `action` unless the interpreter has ended for this thread; returns whether it did. While
// `taking` is not 0, the thread that ends the interpreter waits.
template <typename Action>
bool run_unless_ended(const Action& action) {
  Process& p = process();
  ++p.taking;
  const bool gone = p.ended && !p.is_ending_here();
  if (!gone) action();
  --p.taking;
  return !gone;
}

// Releases the GIL while it exists.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    // If the interpreter has ended, the thread stays here until the process ends.
    while (!run_unless_ended([&] { PyEval_RestoreThread(state_); })) ::pause();
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Blocks signals while a thread is started. The new thread inherits the mask, so signals only go to
// Python's threads.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF}) {
      sigdelset(&all, own);
    }
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

Raised raised_now() { return Raised(nb::python_error()); }

// Whether the program is ending, in another thread than this one.
bool program_is_ending() { return process().ending && !process().is_ending_here(); }

Raised program_ends() {
  PyErr_SetNone(PyExc_SystemExit);
  return raised_now();
}

// ---- A long call ----

class PythonCall {
 public:
  explicit PythonCall(std::shared_ptr<Interrupt> interrupt) : interrupt_(std::move(interrupt)) {
    {
      std::lock_guard lock(process().mutex);
      process().calls.insert(this);
    }
    if (program_is_ending()) stop(program_ends());
  }
  ~PythonCall() {
    std::lock_guard lock(process().mutex);
    process().calls.erase(this);
  }
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;

  // Throws what the library throws. An exception from Python takes precedence over it.
  void run(const CallWork& work) {
    start(work);
    serve();
    {
      const ReleasedGil released;
      engine_->join();
    }
    deliver_messages();
    if (program_is_ending()) note(program_ends());
    if (raised_) throw *raised_;
    if (failure_) std::rethrow_exception(failure_);
  }

  bool is_of_this_process() const { return process_ == ::getpid(); }

  // The next three are called by threads of the library.

  void ask(const std::function<void()>& task) {
    Request request{&task, false, nullptr};
    std::unique_lock lock(mutex_);
    requests_.push_back(&request);
    changed_.notify_one();
    answered_.wait(lock, [&] { return request.done; });
    if (request.failure) std::rethrow_exception(request.failure);
  }
  std::shared_ptr<const Interrupt> interrupt() const { return interrupt_; }
  void stop(const Raised& why) { interrupt_->request(std::make_exception_ptr(why)); }

 private:
  struct Request {
    const std::function<void()>* task;
    bool done;
    std::exception_ptr failure;
  };

  void start(const CallWork& work) {
    const BlockedSignals blocked;
    try {
      const void* step = CallScope::current().step;  // a callback's call works for that too
      engine_ = std::make_unique<std::thread>([this, &work, step] {
        try {
          const CallScope scope({this, step});
          work(interrupt_);
        } catch (...) {
          failure_ = std::current_exception();
        }
        std::lock_guard lock(mutex_);
        ended_ = true;
        changed_.notify_one();
      });
    } catch (const std::system_error& error) {
      throw Error(ErrorCode::kIo,
                  std::string("could not start a thread for a call: ") + error.what());
    }
  }

  // Serves requests, messages and signals until the work has ended. The GIL is held on entry and on
  // return.
  void serve() {
    for (bool ended = false; !ended;) {
      std::deque<Request*> requests;
      {
        ReleasedGil released;
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, kSignalPoll, [&] { return ended_ || !requests_.empty(); });
        requests = std::exchange(requests_, {});
        ended = ended_;
      }
      give_back_dropped();
      if (PyErr_CheckSignals() != 0) note(raised_now());
      deliver_messages();
      for (Request* request : requests) answer(*request);
    }
  }

  // For a child that a callback has forked and that returned from the callback. The work's thread
  // does not exist in the child.
  [[noreturn]] void leave_to_parent() {
    throw Error(ErrorCode::kUnsupported,
                "a callback has forked this process: the call continues in the parent");
  }

  void answer(Request& request) {
    std::exception_ptr failure;
    try {
      (*request.task)();
    } catch (...) {
      failure = std::current_exception();
      note_what_ends_the_program(failure);
    }
    if (!is_of_this_process()) leave_to_parent();
    {
      std::lock_guard lock(mutex_);
      request.failure = std::move(failure);
      request.done = true;
    }
    answered_.notify_all();
  }

  // Makes the call raise a callback's KeyboardInterrupt or SystemExit itself, whatever the library
  // makes of the callback's failure.
  void note_what_ends_the_program(const std::exception_ptr& failure) {
    try {
      try {
        std::rethrow_exception(failure);
      } catch (...) {
        rethrow_cause();
      }
    } catch (const Raised& raised) {
      if (raised.ends_the_program()) note(raised);
    } catch (...) {
    }
  }

  void note(const Raised& raised) {
    stop(raised);
    if (!raised_) raised_ = raised;
  }

  void deliver_messages() {
    if (const auto raised = deliver(process().take_messages())) note(*raised);
  }

  const pid_t process_ = ::getpid();
  std::unique_ptr<std::thread> engine_;
  const std::shared_ptr<Interrupt> interrupt_;
  std::optional<Raised> raised_;  // from the calling thread
  std::exception_ptr failure_;    // from the work

  std::mutex mutex_;  // guards all members below
  std::condition_variable changed_, answered_;
  std::deque<Request*> requests_;
  bool ended_ = false;
};

// PyGILState_Check is not in the stable ABI, although every CPython so far exports it. In one that
// does not, no thread counts as having the GIL.
bool holds_gil() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() != 0;
}

void run_short(const CallWork& work) {
  std::exception_ptr failure;
  {
    ReleasedGil released;
    try {
      work(nullptr);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (const auto raised = deliver(process().take_messages())) throw *raised;
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

Raised::Raised(const nb::python_error& raised) : exception_(keep_alive(raised.value())) {
  text_ = nb::cast<std::string>(raised.type().attr("__name__"));
  nb::object text = nb::steal(PyObject_Str(raised.value().ptr()));
  const char* utf8 = text.is_valid() ? PyUnicode_AsUTF8AndSize(text.ptr(), nullptr) : nullptr;
  if (utf8 == nullptr) PyErr_Clear();
  if (utf8 != nullptr && *utf8 != '\0') text_ += std::string(": ") + utf8;
}

nb::object Raised::exception() const { return nb::borrow(kept_object(exception_)); }

bool Raised::ends_the_program() const {
  return PyErr_GivenExceptionMatches(exception().ptr(), PyExc_Exception) == 0;
}

void Raised::add_note(const std::string& note) const {
  const nb::object exception = this->exception();
  if (!nb::hasattr(exception, "add_note")) return;
  const nb::object text = python_text(note);
  const nb::object notes = nb::getattr(exception, "__notes__", nb::none());
  if (notes.is_none() || PySequence_Contains(notes.ptr(), text.ptr()) != 1) {
    exception.attr("add_note")(text);
  }
}

void Raised::restore() const {
  nb::object exception = this->exception();
  PyObject* traceback = PyException_GetTraceback(exception.ptr());
  PyObject* type = nb::borrow(exception.type()).release().ptr();
  PyErr_Restore(type, exception.release().ptr(), traceback);
}

TakenGil::TakenGil() {
  if (!Py_IsInitialized()) return;
  valid_ = run_unless_ended([&] { state_ = PyGILState_Ensure(); });
}

TakenGil::~TakenGil() {
  if (valid_) PyGILState_Release(state_);
}

Entered::Entered() {
  if (program_is_ending()) {
    PyErr_SetNone(PyExc_SystemExit);
    throw nb::python_error();
  }
  give_back_dropped();
  ++process().entered;
}

Entered::~Entered() {
  give_back_dropped();
  --process().entered;
}

void call_library(WithoutGil::Length length, const CallWork& work) {
  if (length == WithoutGil::kLong) return call_library(work, std::make_shared<Interrupt>());
  const Entered entered;
  run_short(work);
}

void call_library(const CallWork& work, std::shared_ptr<Interrupt> interrupt) {
  const Entered entered;
  follow_log_level();
  // In a forked child the call is not destroyed, because its thread does not exist there.
  const auto drop = [](PythonCall* call) {
    if (call->is_of_this_process()) delete call;
  };
  const std::unique_ptr<PythonCall, decltype(drop)> call(new PythonCall(std::move(interrupt)),
                                                         drop);
  call->run(work);
}

void run_in_python(const std::function<void()>& work) {
  if (Py_IsInitialized() != 0 && holds_gil()) return work();
  if (auto* call = static_cast<PythonCall*>(CallScope::current().call)) return call->ask(work);
  run_in_python_here(work);
}

void run_in_python_here(const std::function<void()>& work) {
  const TakenGil held;
  if (!held.valid()) throw Error(ErrorCode::kInterrupted, "the interpreter has ended");
  work();
}

std::function<bool()> ends_early() {
  auto* call = static_cast<PythonCall*>(CallScope::current().call);
  if (call == nullptr) return [] { return false; };
  return [interrupt = call->interrupt()] { return interrupt->requested(); };
}

void drop_reference(PyObject* object) {
  if (Py_IsInitialized() == 0) return;
  if (holds_gil()) return Py_DECREF(object);
  Process& p = process();
  bool first = false;
  {
    std::lock_guard lock(p.mutex);
    first = p.dropped.empty();
    p.dropped.push_back(object);
  }
  if (first) Py_AddPendingCall(give_back_dropped, nullptr);
}

void post_message(LogLevel level, std::string_view text) {
  std::lock_guard lock(process().mutex);
  process().messages.push_back({level, std::string(text)});
}

void leave_threads_behind() {
  static std::thread::id ending;
  static std::terminate_handler before = nullptr;
  if (before != nullptr) return;
  ending = std::this_thread::get_id();
  before = std::set_terminate([] {
    if (std::this_thread::get_id() == ending) before();
    while (true) ::pause();
  });
}

void end_all_calls() {
  Process& p = process();
  p.ending_thread = std::this_thread::get_id();
  p.ending = true;
  {
    const Raised why = program_ends();
    std::lock_guard lock(p.mutex);
    for (PythonCall* call : p.calls) call->stop(why);
  }
  const auto wait_for_none = [](const std::atomic<int>& count) {
    const auto end = std::chrono::steady_clock::now() + kExitWait;
    while (count > 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(2));
    }
  };
  ReleasedGil released;
  wait_for_none(p.entered);
  p.ended = true;
  wait_for_none(p.taking);
}

}  // namespace tilestone::python
