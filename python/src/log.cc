// The library's messages in Python's logging.
//
// The library's sink runs under a lock of its own, so it must never wait for the GIL: whoever
// holds the GIL might be waiting for that lock. The sink only queues. While a call of the library
// runs, one pump thread hands the queue to logging; what is left over follows when it ends.
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

struct Message {
  LogLevel level;
  std::string text;
};

// Lives as long as the process: threads of the library may log until its end.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Message> messages;

  std::deque<Message> take() {
    std::lock_guard lock(mutex);
    return std::exchange(messages, {});
  }
};

Queue& queue() {
  static Queue* const the_queue = new Queue;
  return *the_queue;
}

int python_level(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return 10;
    case LogLevel::kInfo:
      return 20;
    case LogLevel::kWarning:
      return 30;
    default:
      return 40;
  }
}

LogLevel level_of(int python_level) {
  if (python_level <= 10) return LogLevel::kDebug;
  if (python_level <= 20) return LogLevel::kInfo;
  if (python_level <= 30) return LogLevel::kWarning;
  return python_level <= 40 ? LogLevel::kError : LogLevel::kOff;
}

nb::object logger() { return nb::module_::import_("logging").attr("getLogger")("tilestone"); }

// With the GIL held. A handler that raises must not end a save: its error is shown, not raised.
void deliver(const std::deque<Message>& messages) {
  try {
    nb::object log = logger().attr("log");
    for (const Message& message : messages) log(python_level(message.level), message.text);
  } catch (nb::python_error& raised) {
    raised.discard_as_unraisable("tilestone's log messages");
  }
}

}  // namespace

// Members in the order of their end: the pump stops before the GIL is taken back.
struct WithoutGil::State {
  PyThreadState* released = nullptr;
  bool stop = false;
  std::thread pump;

  void run() {
    Queue& q = queue();
    std::unique_lock lock(q.mutex);
    while (true) {
      q.changed.wait(lock, [&] { return stop || !q.messages.empty(); });
      if (stop) return;
      std::deque<Message> messages = std::exchange(q.messages, {});
      lock.unlock();
      {
        nb::gil_scoped_acquire held;
        deliver(messages);
      }
      lock.lock();
    }
  }
};

WithoutGil::WithoutGil(Length length) : state_(std::make_unique<State>()) {
  if (length == kLong) {
    set_log_level(level_of(nb::cast<int>(logger().attr("getEffectiveLevel")())));
  }
  state_->released = PyEval_SaveThread();
  if (length == kLong) state_->pump = std::thread([this] { state_->run(); });
}

WithoutGil::~WithoutGil() {
  {
    std::lock_guard lock(queue().mutex);
    state_->stop = true;
  }
  queue().changed.notify_all();
  if (state_->pump.joinable()) state_->pump.join();
  PyEval_RestoreThread(state_->released);
  if (auto messages = queue().take(); !messages.empty()) {
    nb::error_scope kept;  // an exception may be on its way out
    deliver(messages);
  }
}

void bind_log(nb::module_& m) {
  set_log_sink([](LogLevel level, std::string_view text) {
    {
      std::lock_guard lock(queue().mutex);
      queue().messages.push_back({level, std::string(text)});
    }
    queue().changed.notify_all();
  });
  m.def(
      "log",
      [](const std::string& level, const std::string& message) {
        static constexpr std::pair<const char*, LogLevel> kLevels[] = {
            {"debug", LogLevel::kDebug},
            {"info", LogLevel::kInfo},
            {"warning", LogLevel::kWarning},
            {"error", LogLevel::kError}};
        for (const auto& [name, value] : kLevels) {
          if (level == name) {
            return without_gil([&, v = value] { log(v, message); }, WithoutGil::kShort);
          }
        }
        throw Error(ErrorCode::kInvalidArgument, "\"" + level + "\" is no level of a message");
      },
      nb::arg("level"), nb::arg("message"), "Logs a message as the engine does.");
}

}  // namespace tilestone::python
