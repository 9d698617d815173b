// The only exception type of Tilestone.
//
// An Error says what failed (code, message), where (key, file, rank) and what to try (hint).
// Between threads it travels as std::exception_ptr. Between ranks it travels as encode()d bytes;
// the receiving rank throws the decoded copy, so every rank throws the same error.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tilestone {

// Why an operation failed. The names are part of the API: Python maps each to an exception class,
// the command line to an exit code. The numbers travel between ranks, so only append.
enum class ErrorCode : uint8_t {
  kInvalidArgument = 1,  // the caller passed an invalid argument
  kNotFound = 2,         // no such checkpoint, key or file
  kAlreadyExists = 3,    // the file or a valid checkpoint exists, and `overwrite` was not set
  kMismatch = 4,         // dtype or shape differs between ranks, or between state and checkpoint
  kCoverage = 5,         // no rank writes an element, two ranks write it, or no chunk contains it
  kCorrupt = 6,          // files of a checkpoint are damaged, cut, lost, or contradict each other
  kUnsafe = 7,           // content that looks like an attack, not like damage; refused, not run
  kUnsupported = 8,      // a valid request or file that this version or this system can't handle
  kIo = 9,               // the operating system reported an error; sys_errno() is its errno
  kTimeout = 10,         // a deadline passed
  kRankFailed = 11,      // another rank failed or disappeared
  kInternal = 12,        // a defect of Tilestone
  kInterrupted = 13,     // the caller stopped a rank (Ctrl-C), or the caller's code threw
};

// "invalid_argument", "not_found", ...
std::string_view to_string(ErrorCode code);

// What exactly happened, where a caller acts on it. Python has the names in `error.reason`. The
// numbers travel between ranks, so only append.
enum class Reason : uint8_t {
  kNone = 0,
  kNoCheckpoint = 1,         // nothing at the location is a checkpoint
  kKeyNotStored = 2,         // the checkpoint has no such key
  kTensorStored = 3,         // it has a tensor under the key, and an object is requested
  kObjectStored = 4,         // it has an object under the key, and a tensor is requested
  kShapeDiffers = 5,         // the global shapes of state and checkpoint
  kDtypeDiffers = 6,         // their dtypes
  kNotRequested = 7,         // the checkpoint has keys that the state does not ask for
  kCheckpointExists = 8,     // a save without `overwrite` has found a checkpoint
  kUnderWay = 9,             // another save, repair or removal holds the location
  kDifferentCalls = 10,      // the ranks have made different calls
  kDifferentArguments = 11,  // the ranks have made one call with different arguments
};
inline constexpr Reason kLastReason = Reason::kDifferentArguments;

// "", "no_checkpoint", "key_not_stored", ...
std::string_view to_string(Reason reason);

// One thing to try after an error: `before`, then an option and the value to give it, then `after`;
// or only text. The option is named as docs/options.md does, and the value is a word there:
// {"", "overwrite", "true", " replaces it"}. Without a value only the option is named. C++, Python
// and the drop-ins each word an option in their own way.
struct Advice {
  std::string before;
  std::string option = "";
  std::string value = "";
  std::string after = "";

  bool operator==(const Advice&) const = default;
};
using Hint = std::vector<Advice>;

// In C++'s words, separated by "; ".
std::string to_string(const Hint& hint);

class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message);

  // Add context at the throw site: throw Error(...).with_key(k).with_file(f).
  // A field that is already set keeps its value, because the innermost frame knows best.
  Error& with_key(std::string_view key);
  Error& with_file(std::string_view file);
  Error& with_rank(int rank);
  Error& with_hint(std::string_view hint);
  Error& with_hint(Hint hint);
  Error& with_reason(Reason reason);
  Error& with_errno(int value);
  // The exception that this error was made from (see current_error). encode() leaves it out.
  Error& with_cause(std::exception_ptr cause);

  // The same error with another message.
  Error with_message(std::string message) const;
  // With one more thing to try.
  Error with_advice(Advice advice) const;

  ErrorCode code() const { return code_; }
  Reason reason() const { return reason_; }
  const std::string& message() const { return message_; }
  const std::string& key() const { return key_; }
  const std::string& file() const { return file_; }
  int rank() const { return rank_; }  // -1: unknown
  const Hint& advice() const { return hint_; }
  std::string hint() const { return to_string(hint_); }
  int sys_errno() const { return errno_; }                    // 0: none
  const std::exception_ptr& cause() const { return cause_; }  // null: none

  // One line: the message, then the errno's text, "(key ...)", "(file ...)", "(rank ...)" and the
  // hint, each only if set. Control characters are escaped.
  const char* what() const noexcept override { return what_.c_str(); }

  // Serialise an error to send it to another rank. decode() throws Error(kCorrupt) for bytes that
  // encode() did not make.
  std::vector<std::byte> encode() const;
  static Error decode(std::span<const std::byte> bytes);

 private:
  void render();

  ErrorCode code_;
  Reason reason_ = Reason::kNone;
  int rank_ = -1;
  int errno_ = 0;
  std::string message_, key_, file_, what_;
  Hint hint_;
  std::exception_ptr cause_;
};

// Converts the exception being handled to an Error. Call inside a catch block. An Error is returned
// as it is. std::bad_alloc becomes kIo with ENOMEM. std::system_error (no thread could be started)
// becomes kIo with its errno. Any other type comes from the caller's code and becomes kInterrupted
// with the exception as its cause.
Error current_error();

// Rethrows the exception being handled, or its cause if it is an Error with a cause. Call inside a
// catch block where a call leaves the library: the caller then gets the exception that its own code
// threw.
[[noreturn]] void rethrow_cause();

// Log messages. spdlog writes them to standard error, unless a sink replaces it (Python's logging).

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
