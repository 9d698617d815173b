#include "tilestone/base/error.h"

#include <pthread.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "tilestone/base/printable.h"

namespace tilestone {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      break;
  }
  return spdlog::level::off;
}

// The log is shared by the whole process: the messages of every engine go to the same place.
struct Log {
  std::atomic<LogLevel> level = LogLevel::kWarning;
  std::mutex mutex;  // guards the members below and serialises the calls of the sink
  std::function<void(LogLevel, std::string_view)> sink;
  std::set<std::string, std::less<>> once;
  spdlog::logger stderr_logger{"tilestone", std::make_shared<spdlog::sinks::stderr_sink_st>()};

  Log() {
    stderr_logger.set_pattern("%Y-%m-%d %H:%M:%S.%e tilestone %l: %v");
    stderr_logger.set_level(spdlog::level::trace);
    stderr_logger.flush_on(spdlog::level::trace);
  }
};

// Never destroyed, because a thread may log while the process exits.
Log& the_log() {
  static Log* const log = [] {
    auto* made = new Log;
    // The fork takes the mutex, so that a thread that is logging does not leave it locked in the
    // child.
    ::pthread_atfork([] { the_log().mutex.lock(); }, [] { the_log().mutex.unlock(); },
                     [] { the_log().mutex.unlock(); });
    return made;
  }();
  return *log;
}

bool is_dropped(const Log& log, LogLevel level) {
  return level == LogLevel::kOff || level < log.level.load(std::memory_order_relaxed);
}

void write(Log& log, LogLevel level, std::string_view message) {
  const std::string line = printable(message);
  if (log.sink) {
    log.sink(level, line);
  } else {
    log.stderr_logger.log(to_spdlog(level), spdlog::string_view_t(line.data(), line.size()));
  }
}

}  // namespace

void log(LogLevel level, std::string_view message) {
  Log& log = the_log();
  if (is_dropped(log, level)) return;
  const std::lock_guard lock(log.mutex);
  write(log, level, message);
}

void log_once(LogLevel level, std::string_view message) {
  Log& log = the_log();
  if (is_dropped(log, level)) return;
  const std::lock_guard lock(log.mutex);
  if (log.once.emplace(message).second) write(log, level, message);
}

LogLevel set_log_level(LogLevel level) { return the_log().level.exchange(level); }

void set_log_sink(std::function<void(LogLevel, std::string_view)> sink) {
  Log& log = the_log();
  const std::lock_guard lock(log.mutex);
  log.sink = std::move(sink);
}

}  // namespace tilestone
