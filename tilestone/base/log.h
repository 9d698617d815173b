// Log messages. spdlog formats and filters; a sink can be put in its place (Python's logging).
#pragma once

#include <functional>
#include <string_view>

namespace tilestone {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kOff = 4 };

void log(LogLevel level, std::string_view message);
// The same message only once in the life of the process ("io_uring is not available: ...").
void log_once(LogLevel level, std::string_view message);

// Messages below `level` are dropped; kWarning at start. Returns the level before.
LogLevel set_log_level(LogLevel level);

// Where messages go instead of standard error; called from any thread, one call at a time. An
// empty function restores standard error. A lock is held while the sink runs: it must not log or
// throw, and a sink that takes a lock of its own (Python's GIL) requires that nobody who calls
// log() or set_log_sink() holds that lock.
void set_log_sink(std::function<void(LogLevel, std::string_view)> sink);

}  // namespace tilestone
