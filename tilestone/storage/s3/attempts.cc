#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tilestone/storage/s3/attempts_internal.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace {

using std::chrono::seconds;
using SystemClock = std::chrono::system_clock;

constexpr int kDamagedAttempts = 3;
constexpr int kCorrections = 3;        // of region, clock and credentials, by one request
constexpr int kAttemptsBeforeLog = 6;  // of which the last comes after some seconds
constexpr seconds kLogPause{30};
constexpr seconds kSkew{240};  // stores accept 15 minutes

// The status of an error that stands in the body of a 200.
int status_of(std::string_view code) {
  if (code == "PreconditionFailed") return 412;
  if (code == "NoSuchUpload" || code == "NoSuchKey") return 404;
  if (code == "AccessDenied") return 403;
  return is_passing_code(code) ? 503 : 400;
}

Error no_contact(const std::string& request, const std::string& silence) {
  return Error(ErrorCode::kIo, request + " failed: " + silence)
      .with_hint(
          "is the endpoint right (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION), and does "
          "this host reach it?");
}

std::string host_of(const std::string& origin) { return origin.substr(origin.find("://") + 3); }

}  // namespace

Place::Place(const Config& settings, std::string name)
    : config(settings),
      bucket(std::move(name)),
      region_(settings.region),
      credentials_(settings.environment, settings.region, settings.ca_bundle) {}

// A certificate for *.s3.amazonaws.com holds for one label only, and capitals are no host name.
bool Place::in_path() const {
  return config.path_style ||
         bucket.find_first_of(".ABCDEFGHIJKLMNOPQRSTUVWXYZ_") != std::string::npos;
}

std::string Place::base_url() const {
  std::string origin = config.endpoint;
  if (origin.empty()) {
    const char* const domain = region_.starts_with("cn-") ? "amazonaws.com.cn" : "amazonaws.com";
    origin = fmt::format("https://s3.{}.{}", region_, domain);
  }
  const size_t host = origin.find("://") + 3;
  return in_path() ? origin : origin.insert(host, bucket + ".");
}

std::string Place::path_of(const std::string& key) const {
  if (!in_path()) return "/" + key;
  return key.empty() ? "/" + bucket : "/" + bucket + "/" + key;
}

std::optional<HttpRequest> Place::signed_request(const Request& request, Signature& used) {
  const std::optional<Credentials> credentials = credentials_.get();
  if (!credentials) return std::nullopt;
  used = {credentials->keys, base_url(), region_, clock_offset_};
  const std::string path = path_of(request.key), query = encoded_query(request.query);
  HttpRequest out = {.method = request.method,
                     .url = used.origin + encoded_path(path) + (query.empty() ? "" : "?" + query),
                     .headers = request.headers,
                     .body = request.body,
                     .into = request.into};
  if (!request.document.empty()) out.body = {as_bytes(request.document)};
  out.headers.insert(config.every_request.begin(), config.every_request.end());
  out.headers["host"] = host_of(used.origin);
  sign(out.headers, request.method, path, request.query, used.keys, used.region,
       SystemClock::now() + used.clock_offset);
  return out;
}

bool Place::take_region(const HttpAnswer& answer, const Refusal& refusal, const Signature& used) {
  const std::string header = answer.header("x-amz-bucket-region");
  const std::string& region = header.empty() ? refusal.region : header;
  if (region.empty() || region == used.region) return false;
  region_ = region;
  return true;
}

bool Place::take_clock(const HttpAnswer& answer, const Signature& used) {
  const auto date = parse_utc(answer.header("date"), "%a, %d %b %Y %H:%M:%S");
  if (!date) return false;
  const auto now = std::chrono::floor<seconds>(SystemClock::now());
  const seconds offset = std::chrono::floor<seconds>(*date) - now;
  if (std::chrono::abs(offset - used.clock_offset) < kSkew) return false;
  clock_offset_ = offset;
  log_once(LogLevel::kWarning,
           fmt::format("this machine's clock and that of s3://{} are {} s apart", bucket,
                       offset.count()));
  return true;
}

Attempts::Attempts(Place& place, Http& http, Request request, Deadline deadline, AtEnd at_end)
    : http_(http),
      place_(place),
      request_(std::move(request)),
      deadline_(std::move(deadline)),
      at_end_(std::move(at_end)),
      process_(::getpid()) {}

void Attempts::check() {
  if (given_up_)
    throw Error(ErrorCode::kInterrupted,
                name_of(request_, place_.bucket) + " was given up by its caller");
  if (!place_.has_answered && Deadline::Clock::now() < place_.silent_until) {
    throw no_contact(name_of(request_, place_.bucket), place_.silence);
  }
  if (!deadline_.expired()) return;
  if (attempts_ > 0 && has_no_contact()) throw give_up_contact();
  throw Error(ErrorCode::kTimeout, fmt::format("{} has not ended in time, after {} attempts{}{}",
                                               name_of(request_, place_.bucket), attempts_,
                                               problem_.empty() ? "" : "; the last: ", problem_));
}

std::optional<HttpRequest> Attempts::next() {
  std::optional<HttpRequest> request = place_.signed_request(request_, used_);
  if (!request) {
    problem_ = place_.credentials_problem();
  } else if (++attempts_ == 1) {
    begun_ = Deadline::Clock::now();
    problem_.clear();
  }
  return request;
}

std::optional<std::chrono::nanoseconds> Attempts::answered(HttpAnswer answer) {
  const bool has_refusal = request_.answers_xml || answer.status / 100 != 2;
  const Refusal refusal = has_refusal ? parse_refusal(answer.body) : Refusal();
  if (answer.status == 200 && !refusal.code.empty()) answer.status = status_of(refusal.code);
  place_.has_answered |= answer.failure == Failure::kNone;
  const Verdict verdict = judge(request_, answer, refusal);
  const Pause pause = decide(verdict, answer, refusal);
  const std::lock_guard lock(mutex_);
  if (pause) {
    const bool correction = verdict != Verdict::kAgain && verdict != Verdict::kDamaged;
    answer_.repeated |= !correction && answer.failure != Failure::kUnreachable;
  } else {
    answer_.http = std::move(answer);
  }
  return pause;
}

Attempts::Pause Attempts::decide(Verdict verdict, const HttpAnswer& answer,
                                 const Refusal& refusal) {
  if (verdict == Verdict::kDone) return std::nullopt;
  note_problem(answer, refusal);
  const auto now = std::chrono::nanoseconds(0);
  const bool may_correct = corrections_ < kCorrections;
  switch (verdict) {
    case Verdict::kAgain:
      if (answer.failure == Failure::kNone || attempts_ == 1 || !has_no_contact()) return pause();
      throw give_up_contact();
    case Verdict::kDamaged:
      if (++damaged_ < kDamagedAttempts) return pause();
      break;
    case Verdict::kRegion:
      if (may_correct && place_.take_region(answer, refusal, used_)) return ++corrections_, now;
      [[fallthrough]];  // AWS names the region with other answers to HEAD too, which have no code
    case Verdict::kCredentials:
      if (may_correct && place_.renew_credentials(used_)) return ++corrections_, now;
      break;
    case Verdict::kClock:
      if (may_correct && place_.take_clock(answer, used_)) return ++corrections_, now;
      break;
    case Verdict::kDone:
    case Verdict::kFailed:
      break;
  }
  throw refused(request_, place_.bucket, answer, refusal);
}

bool Attempts::has_no_contact() const {
  return !place_.has_answered && Deadline::Clock::now() - begun_ > place_.config.first_contact;
}

Error Attempts::give_up_contact() {
  using Time = std::chrono::duration<double>;
  const auto now = Deadline::Clock::now();
  place_.silent_until = now + place_.config.first_contact;
  place_.silence = fmt::format("{} has not answered for {:.0f} s{}{}", used_.origin,
                               Time(now - begun_).count(), last_.empty() ? "" : ": ", last_);
  return no_contact(name_of(request_, place_.bucket), place_.silence);
}

void Attempts::note_problem(const HttpAnswer& answer, const Refusal& refusal) {
  problem_ = refused(request_, place_.bucket, answer, refusal).message();
  last_ = answer.problem;
  const auto now = Deadline::Clock::now();
  if (attempts_ < kAttemptsBeforeLog || now < place_.next_log) return;
  place_.next_log = now + kLogPause;
  log(LogLevel::kWarning, fmt::format("{}; it is tried again", problem_));
}

std::chrono::nanoseconds Attempts::pause() {
  const double longest = std::min(std::ldexp(static_cast<double>(place_.config.first_pause.count()),
                                             std::min(attempts_ - 1, 30)),
                                  static_cast<double>(place_.config.longest_pause.count()));
  const double part = std::uniform_real_distribution<double>(0.5, 1.0)(chance_);
  return std::chrono::nanoseconds(static_cast<int64_t>(longest * part * 1e6));
}

void Attempts::ended(std::exception_ptr error) {
  if (at_end_) at_end_();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

Answer Attempts::wait() {
  if (process_ != ::getpid()) {
    throw Error(ErrorCode::kInvalidArgument,
                name_of(request_, place_.bucket) + " belongs to the process that began it");
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_; });
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  return std::move(answer_);
}

void Attempts::give_up() noexcept {
  if (process_ != ::getpid()) return;
  given_up_ = true;
  http_.check_now();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_; });
}

Answer wait_for(Attempts& attempts) { return attempts.wait(); }
void give_up(Attempts& attempts) noexcept { attempts.give_up(); }

}  // namespace tilestone::s3
