#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/attempts_internal.h"

namespace tilestone::s3 {
namespace {

template <size_t N>
bool is_one_of(const std::array<std::string_view, N>& codes, std::string_view code) {
  return std::ranges::find(codes, code) != codes.end();
}

constexpr std::array<std::string_view, 4> kExpired = {"ExpiredToken", "ExpiredTokenException",
                                                      "TokenRefreshRequired", "RequestExpired"};
constexpr std::array<std::string_view, 3> kDamagedCodes = {"BadDigest", "InvalidDigest",
                                                           "XAmzContentChecksumMismatch"};
constexpr std::array<std::string_view, 3> kPassing = {"RequestTimeout", "IncompleteBody",
                                                      "Throttling"};

bool is_region(const HttpAnswer& answer, const Refusal& refusal) {
  if (answer.status == 301 || answer.status == 307 || answer.status == 308) return true;
  return answer.status == 400 &&
         (!refusal.region.empty() || !answer.header("x-amz-bucket-region").empty());
}

// "bytes 0-9/100" is what "bytes=0-9" has asked for.
bool is_range_asked_for(const Request& request, const HttpAnswer& answer) {
  const auto asked = request.headers.find("range");
  if (asked == request.headers.end() || answer.status != 206) return false;
  return answer.header("content-range").starts_with("bytes " + asked->second.substr(6) + "/");
}

Verdict judge_success(const Request& request, const HttpAnswer& answer) {
  if (request.answers_xml && !is_document(answer.body)) return Verdict::kAgain;
  if (request.into.empty() || answer.received == request.into.size()) return Verdict::kDone;
  // The range is that of the request, and some of its bytes are missing: the body was cut.
  return is_range_asked_for(request, answer) ? Verdict::kAgain : Verdict::kFailed;
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

ErrorCode code_of(int status) {
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
  const bool of_bucket = refusal.code == "NoSuchBucket";
  const bool accepted = std::ranges::find(request.accepted, status) != request.accepted.end();
  if (accepted && !of_bucket) return Verdict::kDone;
  if (is_region(answer, refusal)) return Verdict::kRegion;
  if (is_one_of(kExpired, refusal.code)) return Verdict::kCredentials;
  // The answer to HEAD has no code.
  if (request.method == "HEAD" && status == 400) return Verdict::kCredentials;
  if (status == 403 && (refusal.code.empty() || refusal.code == "RequestTimeTooSkewed")) {
    return Verdict::kClock;
  }
  if (is_one_of(kDamagedCodes, refusal.code)) return Verdict::kDamaged;
  return is_passing(status) || is_one_of(kPassing, refusal.code) ? Verdict::kAgain
                                                                 : Verdict::kFailed;
}

Error refused(const Request& request, const std::string& bucket, const HttpAnswer& answer,
              const Refusal& refusal) {
  std::string text =
      fmt::format("{} failed: {}", name_of(request, bucket), status_text(answer, refusal));
  if (answer.failure == Failure::kNone && answer.status / 100 == 2) {
    text += fmt::format(": {} bytes were expected, {} found", request.into.size(), answer.received);
  }
  Error error(code_of(answer.failure == Failure::kNone ? answer.status : 0), text);
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
