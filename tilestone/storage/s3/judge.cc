#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/attempts_internal.h"

namespace tilestone::s3 {
namespace {

template <size_t N>
bool is_one_of(const std::array<std::string_view, N>& codes, std::string_view code) {
  return std::ranges::find(codes, code) != codes.end();
}

// Other keys may have taken the place of those that are unknown.
constexpr std::array<std::string_view, 7> kExpired = {
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired",
    "InvalidToken", "InvalidTokenId",        "InvalidAccessKeyId"};
constexpr std::array<std::string_view, 3> kDamagedCodes = {"BadDigest", "InvalidDigest",
                                                           "XAmzContentChecksumMismatch"};
constexpr std::array<std::string_view, 3> kNone = {"NoSuchKey", "NoSuchUpload", "NoSuchVersion"};

bool is_region(const HttpAnswer& answer, const Refusal& refusal) {
  if (answer.status == 301 || answer.status == 307 || answer.status == 308) return true;
  return answer.status == 400 &&
         (!refusal.region.empty() || !answer.header("x-amz-bucket-region").empty());
}

// "bytes 2-5/9" is what "bytes=2-5" has asked for, and "bytes 2-3/4" if the object ends there. Who
// ignores the range sends the whole object.
bool is_range(const std::string& asked, const HttpAnswer& answer) {
  unsigned long long from = 0, to = 0, first = 0, last = 0, size = 0;
  std::sscanf(asked.c_str(), "bytes=%llu-%llu", &from, &to);
  const std::string found = answer.header("content-range");
  if (found.empty()) return answer.status == 200 && from == 0;
  return std::sscanf(found.c_str(), "bytes %llu-%llu/%llu", &first, &last, &size) == 3 &&
         first == from && last + 1 == std::min(to + 1, size) &&
         last + 1 - first == answer.received + answer.body.size();
}

// What is wrong with a 2xx, in words; "": nothing.
std::string flaw_of(const Request& request, const HttpAnswer& answer) {
  if (request.answers_xml)
    return is_document(answer.body) ? "" : "the answer is not a whole document";
  if (request.method == "DELETE") return "";
  if (answer.header("etag").empty()) return "the answer has no ETag";
  const bool has_end = !answer.header("content-length").empty() ||
                       (request.method == "GET" && !answer.header("transfer-encoding").empty());
  if (request.method != "PUT" && !has_end) return "the answer does not say how long it is";
  const auto range = request.headers.find("range");
  if (range == request.headers.end() || is_range(range->second, answer)) return "";
  return fmt::format("{} was asked for; the answer has {} bytes and is \"{}\"", range->second,
                     answer.received + answer.body.size(), answer.header("content-range"));
}

// Whether a removal of many keys has refused some of them for now. It may be done again whole.
bool refuses_for_now(const Request& request, const HttpAnswer& answer) {
  return request.action.name == std::string_view("DeleteObjects") &&
         std::ranges::any_of(parse_deleted(answer.body),
                             [](const NotDeleted& each) { return is_passing_code(each.code); });
}

Verdict judge_success(const Request& request, const HttpAnswer& answer) {
  if (!flaw_of(request, answer).empty()) return Verdict::kDamaged;
  return refuses_for_now(request, answer) ? Verdict::kAgain : Verdict::kDone;
}

// A gateway in front of the store says 404 too, without a code. The answer to HEAD never has one.
bool is_of_gateway(const Request& request, int status, const Refusal& refusal) {
  return status == 404 && refusal.code.empty() && request.method != "HEAD";
}

bool is_passing(int status) {
  return status == 408 || status == 409 || status == 429 || (status >= 500 && status != 501);
}

std::string status_text(const HttpAnswer& answer, const Refusal& refusal) {
  if (answer.failure != Failure::kNone) return answer.problem;
  std::string text = std::to_string(answer.status);
  if (!refusal.code.empty()) text += " " + refusal.code;
  if (!refusal.message.empty()) text += ": " + refusal.message;
  const std::string id =
      refusal.request_id.empty() ? answer.header("x-amz-request-id") : refusal.request_id;
  return id.empty() ? text : fmt::format("{} (request id {})", text, id);
}

ErrorCode code_of(const Request& request, int status, const Refusal& refusal) {
  if (is_of_gateway(request, status, refusal)) return ErrorCode::kIo;
  if (status == 404) return ErrorCode::kNotFound;
  if (status == 412) return ErrorCode::kMismatch;
  return status == 501 ? ErrorCode::kUnsupported : ErrorCode::kIo;
}

}  // namespace

std::string name_of(const Request& request, const std::string& bucket) {
  return fmt::format("{} s3://{}/{}", request.action.name, bucket, request.key);
}

Verdict judge(const Request& request, const HttpAnswer& answer, const Refusal& refusal) {
  if (answer.failure == Failure::kPermanent) return Verdict::kFailed;
  if (answer.failure != Failure::kNone) return Verdict::kAgain;
  const int status = answer.status;
  if (status / 100 == 2) return judge_success(request, answer);
  if (is_of_gateway(request, status, refusal)) return Verdict::kDamaged;
  const bool accepted = std::ranges::find(request.accepted, status) != request.accepted.end();
  const bool is_none = request.method == "HEAD" || is_one_of(kNone, refusal.code);
  if (accepted && (status != 404 || is_none)) return Verdict::kDone;
  if (is_one_of(kExpired, refusal.code)) return Verdict::kCredentials;
  if (is_one_of(kDamagedCodes, refusal.code)) return Verdict::kDamaged;
  if (is_passing(status) || is_passing_code(refusal.code)) return Verdict::kAgain;
  if (is_region(answer, refusal)) return Verdict::kRegion;
  // The answer to HEAD has no code.
  if (request.method == "HEAD" && status == 400) return Verdict::kCredentials;
  if (status == 403 && (refusal.code.empty() || refusal.code == "RequestTimeTooSkewed")) {
    return Verdict::kClock;
  }
  return Verdict::kFailed;
}

Error refused(const Request& request, const std::string& bucket, const HttpAnswer& answer,
              const Refusal& refusal) {
  std::string text =
      fmt::format("{} failed: {}", name_of(request, bucket), status_text(answer, refusal));
  if (answer.failure == Failure::kNone && answer.status / 100 == 2) {
    const std::string flaw = flaw_of(request, answer);
    text += ": " + (flaw.empty() ? "some keys are refused for now" : flaw);
  }
  Error error(code_of(request, answer.failure == Failure::kNone ? answer.status : 0, refusal),
              text);
  if (answer.status != 403) return error;
  const std::string on =
      request.action.permission == std::string_view("s3:ListBucket") || request.key.empty()
          ? bucket
          : bucket + "/" + request.key;
  const bool by_policy = refusal.code.empty() || refusal.code == "AccessDenied";
  if (by_policy) {
    error.with_hint(fmt::format("it needs {} on arn:aws:s3:::{}", request.action.permission, on));
  }
  return error.with_errno(EACCES);
}

}  // namespace tilestone::s3
