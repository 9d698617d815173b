// The one exception type of Tilestone.
//
// An Error says what failed (code, message), where (key, file, rank) and what to try (hint).
// Crossing a thread it travels as std::exception_ptr; crossing a rank it is serialised with
// encode() and the receiving rank throws the decoded copy, so every rank throws the same error.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tilestone {

// Why an operation failed. The names are part of the API (Python maps each to an exception class,
// the command line to an exit code); append only, the numbers travel between ranks.
enum class ErrorCode : uint8_t {
  kInvalidArgument = 1,  // the caller passed something that can't be meant
  kNotFound = 2,         // no such checkpoint, key or file
  kAlreadyExists = 3,    // a valid checkpoint stands here and `overwrite` was not asked for
  kMismatch = 4,         // dtype or shape differs between ranks, or between state and checkpoint
  kCoverage = 5,         // an element is written by nobody, written twice, or not to be found
  kCorrupt = 6,          // bytes of a checkpoint are damaged, truncated or contradict one another
  kUnsafe = 7,           // content that looks like an attack, not like damage; refused, not run
  kUnsupported = 8,      // well-formed, but this version of Tilestone can't do it
  kIo = 9,               // the operating system said no; sys_errno() holds its errno
  kTimeout = 10,         // a deadline passed
  kRankFailed = 11,      // another rank failed or vanished
  kInternal = 12,        // a defect of Tilestone
  kInterrupted = 13,     // the caller of a rank stopped it (Ctrl-C), or code of the caller threw
};

// "invalid_argument", "not_found", ...
std::string_view to_string(ErrorCode code);

class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message);

  // Fluent context, for use at the throw site: throw Error(...).with_key(k).with_file(f).
  // A context that is already set is kept: the innermost frame knows best.
  Error& with_key(std::string_view key) &;
  Error& with_file(std::string_view file) &;
  Error& with_rank(int rank) &;
  Error& with_hint(std::string_view hint) &;
  Error& with_errno(int value) &;
  Error&& with_key(std::string_view key) &&;
  Error&& with_file(std::string_view file) &&;
  Error&& with_rank(int rank) &&;
  Error&& with_hint(std::string_view hint) &&;
  Error&& with_errno(int value) &&;
  // The exception that this error stands for (see current_error); it does not leave the process.
  Error& with_cause(std::exception_ptr cause) &;
  Error&& with_cause(std::exception_ptr cause) &&;

  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const std::string& key() const { return key_; }
  const std::string& file() const { return file_; }
  int rank() const { return rank_; }  // -1: not known
  const std::string& hint() const { return hint_; }
  int sys_errno() const { return errno_; }                    // 0: none
  const std::exception_ptr& cause() const { return cause_; }  // null: none

  // One line: message, then "key ...", "file ...", "rank ..." and the hint where they are set.
  const char* what() const noexcept override { return what_.c_str(); }

  // The bytes that carry an error from rank to rank. decode() throws kCorrupt on foreign bytes.
  std::vector<std::byte> encode() const;
  static Error decode(std::span<const std::byte> bytes);

 private:
  void render();

  ErrorCode code_;
  int rank_ = -1;
  int errno_ = 0;
  std::string message_, key_, file_, hint_, what_;
  std::exception_ptr cause_;
};

// The error in flight as an Error: itself; kIo with ENOMEM for std::bad_alloc, with its errno for
// std::system_error (no thread could be started); kInterrupted with that cause for an exception of
// another type, which code of the caller threw. Call inside a catch block.
Error current_error();

// Throws the error in flight again, or the exception that it stands for. Call inside a catch block,
// where the library is left: the caller gets the exception that its own code threw.
[[noreturn]] void rethrow_cause();

}  // namespace tilestone
