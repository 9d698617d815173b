// Passes the library's messages to Python's logging.
//
// The library calls the sink under its own lock, so the sink must never wait for the GIL: the
// thread that holds the GIL may be waiting for that lock. The sink only queues messages; the thread
// that called the library delivers them (call.h).
#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

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

}  // namespace

void follow_log_level() {
  set_log_level(level_of(nb::cast<int>(logger().attr("getEffectiveLevel")())));
}

// If a handler raises, the remaining messages are still delivered, because they may be the only
// trace of the work.
std::optional<Raised> deliver(const std::vector<Message>& messages) {
  std::optional<Raised> first;
  for (const Message& message : messages) {
    try {
      logger().attr("log")(python_level(message.level), python_text(message.text));
    } catch (const nb::python_error& raised) {
      if (!first) first.emplace(raised);
    }
  }
  return first;
}

void bind_log(nb::module_& m) {
  set_log_sink(post_message);
  m.def(
      "log",
      [](int level, const std::string& message) {
        without_gil([&] { log(level_of(level), message); }, WithoutGil::kShort);
      },
      nb::arg("level"), nb::arg("message"),
      "Logs a message as the engine does; the level is one of `logging`.");
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&end_all_calls));
  m.def("leave_threads_behind", &leave_threads_behind,
        "For the exit of the program: makes threads that are stuck in foreign code wait when they "
        "return.");
}

}  // namespace tilestone::python
