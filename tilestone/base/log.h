// Log messages. spdlog writes them to standard error, unless a sink replaces it (Python's logging).
#pragma once

#include <functional>
#include <string_view>

namespace tilestone {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kOff = 4 };

void log(LogLevel level, std::string_view message);
// Logs a message unless this process has logged the same text before through log_once.
void log_once(LogLevel level, std::string_view message);

// Messages below `level` are dropped. The initial level is kWarning. Returns the previous level.
LogLevel set_log_level(LogLevel level);

// Sends messages to `sink` instead of standard error. An empty function restores standard error.
// Any thread may call the sink, but only one at a time. A lock is held while the sink runs, so the
// sink must not log or throw. If the sink takes a lock of its own (Python's GIL), no caller of
// log() or set_log_sink() may hold that lock.
void set_log_sink(std::function<void(LogLevel, std::string_view)> sink);

}  // namespace tilestone
