#include "tilestone/base/error.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "tilestone/base/bytes.h"
#include "tilestone/base/printable.h"

namespace tilestone {
namespace {

constexpr std::array<std::string_view, 14> kNames = {
    "",         "invalid_argument", "not_found", "already_exists", "mismatch",
    "coverage", "corrupt",          "unsafe",    "unsupported",    "io",
    "timeout",  "rank_failed",      "internal",  "interrupted",
};
constexpr std::array<std::string_view, static_cast<size_t>(kLastReason) + 1> kReasons = {
    "",
    "no_checkpoint",
    "key_not_stored",
    "tensor_stored",
    "object_stored",
    "shape_differs",
    "dtype_differs",
    "not_requested",
    "checkpoint_exists",
    "under_way",
    "different_calls",
    "different_arguments",
};
constexpr uint8_t kEncodingVersion = 2;

void set_if_empty(std::string& field, std::string_view value) {
  if (field.empty()) field = value;
}

// A word of docs/options.md, as C++ writes the value: report is kReport.
std::string cpp_value(std::string value) {
  const bool is_word = value != "true" && value != "false" && !value.empty() &&
                       value.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") == std::string::npos;
  if (!is_word) return value;
  value.front() = static_cast<char>(value.front() - 'a' + 'A');
  return "k" + value;
}

}  // namespace

std::string_view to_string(ErrorCode code) {
  const auto index = static_cast<size_t>(code);
  return index > 0 && index < kNames.size() ? kNames[index] : "unknown";
}

std::string_view to_string(Reason reason) {
  const auto index = static_cast<size_t>(reason);
  return index < kReasons.size() ? kReasons[index] : "";
}

std::string to_string(const Hint& hint) {
  std::string text;
  for (const Advice& advice : hint) {
    if (!text.empty()) text += "; ";
    text += advice.before;
    text += advice.option;
    if (!advice.value.empty()) text += " = " + cpp_value(advice.value);
    text += advice.after;
  }
  return text;
}

Error::Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {
  render();
}

Error& Error::with_key(std::string_view key) {
  set_if_empty(key_, key);
  render();
  return *this;
}

Error& Error::with_file(std::string_view file) {
  set_if_empty(file_, file);
  render();
  return *this;
}

Error& Error::with_rank(int rank) {
  if (rank_ < 0) rank_ = rank;
  render();
  return *this;
}

Error& Error::with_hint(std::string_view hint) {
  return with_hint(hint.empty() ? Hint() : Hint{{std::string(hint)}});
}

Error& Error::with_hint(Hint hint) {
  if (hint_.empty()) hint_ = std::move(hint);
  render();
  return *this;
}

Error& Error::with_reason(Reason reason) {
  if (reason_ == Reason::kNone) reason_ = reason;
  return *this;
}

Error Error::with_message(std::string message) const {
  Error error = *this;
  error.message_ = std::move(message);
  error.render();
  return error;
}

Error Error::with_advice(Advice advice) const {
  Error error = *this;
  error.hint_.push_back(std::move(advice));
  error.render();
  return error;
}

Error& Error::with_errno(int value) {
  if (errno_ == 0) errno_ = value;
  render();
  return *this;
}

Error& Error::with_cause(std::exception_ptr cause) {
  if (cause_ == nullptr) cause_ = std::move(cause);
  return *this;
}

void Error::render() {
  std::string line = message_;
  if (errno_ != 0) line += fmt::format(": {}", std::generic_category().message(errno_));
  if (!key_.empty()) line += fmt::format(" (key {})", key_);
  if (!file_.empty()) line += fmt::format(" (file {})", file_);
  if (rank_ >= 0) line += fmt::format(" (rank {})", rank_);
  if (!hint_.empty()) line += fmt::format("; {}", to_string(hint_));
  what_ = printable(line);
}

std::vector<std::byte> Error::encode() const {
  ByteWriter out;
  out.u8(kEncodingVersion);
  out.u8(static_cast<uint8_t>(code_));
  out.u8(static_cast<uint8_t>(reason_));
  out.i64(rank_);
  out.i64(errno_);
  for (const std::string* text : {&message_, &key_, &file_}) out.string(*text);
  out.u64(hint_.size());
  for (const Advice& advice : hint_) {
    for (const std::string* text : {&advice.before, &advice.option, &advice.value, &advice.after}) {
      out.string(*text);
    }
  }
  return std::move(out).take();
}

Error Error::decode(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "an error sent by another rank");
  if (const uint8_t version = in.u8(); version != kEncodingVersion) {
    in.fail(fmt::format("encoding version {}, expected {}", version, kEncodingVersion));
  }
  const uint8_t code = in.u8();
  if (code == 0 || code >= kNames.size()) in.fail(fmt::format("error code {} is unknown", code));
  const uint8_t reason = in.u8();
  if (reason >= kReasons.size()) in.fail(fmt::format("reason {} is unknown", reason));
  const int64_t rank = in.i64();
  const int64_t sys_errno = in.i64();
  if (!std::in_range<int>(rank) || !std::in_range<int>(sys_errno)) {
    in.fail(fmt::format("rank {} or errno {} is out of range", rank, sys_errno));
  }
  Error error(static_cast<ErrorCode>(code), std::string(in.string()));
  error.key_ = in.string();
  error.file_ = in.string();
  for (uint64_t left = in.u64(); left > 0; --left) {
    Advice& advice = error.hint_.emplace_back();
    for (std::string* text : {&advice.before, &advice.option, &advice.value, &advice.after}) {
      *text = in.string();
    }
  }
  in.expect_end();
  error.reason_ = static_cast<Reason>(reason);
  error.rank_ = static_cast<int>(rank);
  error.errno_ = static_cast<int>(sys_errno);
  error.render();
  return error;
}

Error current_error() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::kIo, "out of memory").with_errno(ENOMEM);
  } catch (const std::system_error& error) {
    return Error(ErrorCode::kIo, "a system call failed").with_errno(error.code().value());
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInterrupted, error.what()).with_cause(std::current_exception());
  } catch (...) {
    return Error(ErrorCode::kInterrupted, "an exception of an unknown type was thrown")
        .with_cause(std::current_exception());
  }
}

void rethrow_cause() {
  try {
    throw;
  } catch (const Error& error) {
    if (error.cause() != nullptr) std::rethrow_exception(error.cause());
    throw;
  }
}

}  // namespace tilestone
