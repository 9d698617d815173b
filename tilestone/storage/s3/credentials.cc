#include "tilestone/storage/s3/credentials.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/answers.h"
#include "tilestone/storage/s3/config.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace {

using SystemClock = std::chrono::system_clock;
using std::chrono::milliseconds;

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

constexpr seconds kRenewBefore{300};  // to twice as long, by chance: ranks begin at the same time
constexpr seconds kRenewAgain{60};
constexpr seconds kSearchAgain{5};
constexpr seconds kPatience{15};  // with an endpoint
constexpr const char* kTimeForm = "%Y-%m-%dT%H:%M:%S";
constexpr const char* kContainerHost = "http://169.254.170.2";
constexpr const char* kInstanceHost = "http://169.254.169.254";

[[noreturn]] void fail(std::string_view source, std::string_view problem) {
  throw Error(ErrorCode::kIo, fmt::format("no AWS credentials from {}: {}", source, problem));
}

std::optional<Credentials> complete(Credentials found) {
  if (found.keys.id.empty() || found.keys.secret.empty()) return std::nullopt;
  return found;
}

// What find_credentials is given.
struct Search {
  const Environment& environment;
  const std::string& region;
  const std::string& ca_bundle;
  const std::stop_token& stop;

  std::string get(const char* name) const { return setting(environment, name); }
};

double chance(double from, double to) {
  thread_local std::minstd_rand engine{std::random_device{}()};
  return std::uniform_real_distribution<double>(from, to)(engine);
}

// STS calls an issuer that is slow a wrong token.
bool may_pass(const HttpAnswer& answer, const Refusal& refusal) {
  if (answer.failure != Failure::kNone) return answer.failure != Failure::kPermanent;
  return answer.status == 429 || answer.status / 100 != 4 || is_passing_code(refusal.code) ||
         refusal.code == "IDPCommunicationError" || refusal.code == "InvalidIdentityToken";
}

// An answer with status 200 (or 404, if that is one too), after attempts for some seconds.
HttpAnswer fetch_again(const HttpRequest& request, HttpSettings settings, const Search& search,
                       std::string_view source, bool may_be_none = false) {
  settings.stop = search.stop;
  const auto end = Clock::now() + kPatience;
  for (auto longest = milliseconds(200);; longest = std::min(2 * longest, milliseconds(3200))) {
    HttpAnswer answer = fetch(request, settings);
    const bool is_answer = answer.failure == Failure::kNone;
    if (is_answer && (answer.status == 200 || (may_be_none && answer.status == 404))) return answer;
    const Refusal refusal = parse_refusal(answer.body);
    const auto next = Clock::now() + chance(0.5, 1) * longest;
    if (!may_pass(answer, refusal) || next > end || search.stop.stop_requested()) {
      fail(source,
           is_answer ? fmt::format("status {} {} {}", answer.status, refusal.code, refusal.message)
                     : answer.problem);
    }
    while (!search.stop.stop_requested() && Clock::now() < next)
      std::this_thread::sleep_for(milliseconds(20));
  }
}

std::optional<Credentials> from_environment(const Search& search) {
  return complete({.keys = {search.get("AWS_ACCESS_KEY_ID"), search.get("AWS_SECRET_ACCESS_KEY"),
                            search.get("AWS_SESSION_TOKEN")},
                   .source = "the environment"});
}

std::string sts_endpoint(const Search& search) {
  for (const char* const name : {"AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL"}) {
    if (const std::string url = search.get(name); !url.empty()) return without_slash(url);
  }
  const char* const host = search.region.starts_with("cn-") ? "amazonaws.com.cn" : "amazonaws.com";
  return fmt::format("https://sts.{}.{}", search.region, host);
}

// A form in the body, so that the token stands in no URL.
std::optional<Credentials> from_web_identity(const Search& search, const std::string& file,
                                             const std::string& role, const std::string& session) {
  if (file.empty() || role.empty()) return std::nullopt;
  const std::string source = "web identity (STS)";
  const auto token = read_text(file);
  if (!token) fail(source, fmt::format("the token's file {} does not exist", file));
  const std::string body =
      encoded_query({{"Action", "AssumeRoleWithWebIdentity"},
                     {"Version", "2011-06-15"},
                     {"RoleArn", role},
                     {"RoleSessionName", session.empty() ? "tilestone" : session},
                     {"WebIdentityToken", std::string(trimmed(*token))}});
  const HttpRequest request = {.method = "POST",
                               .url = sts_endpoint(search) + "/",
                               .headers = {{"content-type", "application/x-www-form-urlencoded"}},
                               .body = {as_bytes(body)}};
  const HttpSettings settings = {.ca_bundle = search.ca_bundle, .whole = milliseconds(5000)};
  const HttpAnswer answer =
      fetch_again(request, with_proxy(settings, search.environment, request.url), search, source);
  const WebIdentityAnswer found = parse_web_identity(answer.body);
  return complete(
      {{found.id, found.secret, found.token}, parse_utc(found.expiration, kTimeForm), source});
}

std::optional<Credentials> from_section(const Section& section, std::string source) {
  const auto get = [&](const char* name) { return setting(section, name); };
  return complete(
      {.keys = {get("aws_access_key_id"), get("aws_secret_access_key"), get("aws_session_token")},
       .source = std::move(source)});
}

// Settings of the profile without which its user would get another identity than they think.
void refuse(const Profile& profile, std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    if (!profile.config.contains(name) && !profile.credentials.contains(name)) continue;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the AWS profile {} gets its credentials by {}, which this client does "
                            "not do",
                            profile.name, name))
        .with_hint("run `aws configure export-credentials --format env` and export what it prints");
  }
}

std::optional<Credentials> from_profile(const Search& search) {
  const Profile profile = read_profile(search.environment);
  const auto get = [&](const char* name) { return setting(profile.config, name); };
  // A role comes before keys, which are those that may take it.
  if (get("web_identity_token_file").empty()) refuse(profile, {"role_arn"});
  if (auto found = from_section(profile.credentials,
                                fmt::format("profile {} of the credentials file", profile.name))) {
    return found;
  }
  if (auto found = from_web_identity(search, get("web_identity_token_file"), get("role_arn"),
                                     get("role_session_name"))) {
    return found;
  }
  if (auto found = from_section(profile.config,
                                fmt::format("profile {} of the config file", profile.name))) {
    return found;
  }
  refuse(profile,
         {"role_arn", "sso_session", "sso_start_url", "credential_process", "login_session"});
  return std::nullopt;
}

std::optional<Credentials> parse_json(const std::string& body, const std::string& source) {
  const auto json = nlohmann::json::parse(body, nullptr, false);
  const auto get = [&](const char* name) -> std::string {
    const auto found = json.find(name);
    return found != json.end() && found->is_string() ? found->get<std::string>() : "";
  };
  if (!json.is_object() || get("AccessKeyId").empty()) fail(source, "its answer has none");
  return complete({{get("AccessKeyId"), get("SecretAccessKey"), get("Token")},
                   parse_utc(get("Expiration"), kTimeForm),
                   source});
}

// Only AWS's own addresses and this machine may receive the container's token without encryption.
bool may_receive_token(const std::string& url) {
  if (url.starts_with("https://")) return true;
  constexpr std::array kHosts = {"http://127.0.0.1",      "http://localhost",
                                 "http://[::1]",          kContainerHost,
                                 "http://169.254.170.23", "http://[fd00:ec2::23]"};
  return std::ranges::any_of(kHosts, [&](std::string_view host) {
    return url.starts_with(host) &&
           (url.size() == host.size() || url[host.size()] == '/' || url[host.size()] == ':');
  });
}

std::optional<Credentials> from_container(const Search& search) {
  const std::string source = "the container's endpoint";
  const std::string relative = search.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
  const std::string full = search.get("AWS_CONTAINER_CREDENTIALS_FULL_URI");
  if (relative.empty() && full.empty()) return std::nullopt;
  const std::string url = relative.empty() ? full : kContainerHost + relative;
  if (!may_receive_token(url) || url.find('@') != std::string::npos) {
    fail(source, "its URL is neither https nor on this machine");
  }
  std::string token = search.get("AWS_CONTAINER_AUTHORIZATION_TOKEN");
  const std::string file = search.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
  if (!file.empty()) token = trimmed(read_text(file).value_or(""));
  HttpRequest request = {.method = "GET", .url = url, .headers = {}};
  if (!token.empty()) request.headers["authorization"] = token;
  const HttpSettings settings = {.ca_bundle = search.ca_bundle, .whole = milliseconds(2000)};
  return parse_json(fetch_again(request, settings, search, source).body, source);
}

// IMDSv2: a token first, then the role's name, then its credentials.
std::optional<Credentials> from_instance(const Search& search) {
  if (lower_case(search.get("AWS_EC2_METADATA_DISABLED")) == "true") return std::nullopt;
  const std::string source = "the instance's metadata (IMDSv2)";
  const std::string set = without_slash(search.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"));
  const std::string host = set.empty() ? kInstanceHost : set;
  const HttpSettings settings = {
      .connect = milliseconds(1000), .whole = milliseconds(2000), .stop = search.stop};
  const HttpRequest ask = {.method = "PUT",
                           .url = host + "/latest/api/token",
                           .headers = {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}}};
  HttpAnswer token = fetch(ask, settings);
  if (token.failure != Failure::kNone) token = fetch(ask, settings);
  // This machine is no instance. Other clouds have another service at this address.
  if (token.failure != Failure::kNone || !may_pass(token, {})) return std::nullopt;
  if (token.status != 200) token = fetch_again(ask, settings, search, source);
  const Headers headers = {{"x-aws-ec2-metadata-token", token.body}};
  const std::string list = host + "/latest/meta-data/iam/security-credentials/";
  const HttpAnswer roles = fetch_again({.method = "GET", .url = list, .headers = headers}, settings,
                                       search, source, true);
  const std::string role(trimmed(roles.body.substr(0, roles.body.find('\n'))));
  if (roles.status == 404 || role.empty()) return std::nullopt;
  const HttpRequest request = {
      .method = "GET", .url = list + encoded_path(role), .headers = headers};
  return parse_json(fetch_again(request, settings, search, source).body, source);
}

}  // namespace

Credentials find_credentials(const Environment& environment, const std::string& region,
                             const std::string& ca_bundle, const std::stop_token& stop) {
  const Search search = {environment, region, ca_bundle, stop};
  if (auto found = from_environment(search)) return *found;
  if (auto found =
          from_web_identity(search, search.get("AWS_WEB_IDENTITY_TOKEN_FILE"),
                            search.get("AWS_ROLE_ARN"), search.get("AWS_ROLE_SESSION_NAME"))) {
    return *found;
  }
  if (auto found = from_profile(search)) return *found;
  if (auto found = from_container(search)) return *found;
  if (auto found = from_instance(search)) return *found;
  throw Error(ErrorCode::kNotFound, "no AWS credentials were found")
      .with_hint(
          "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE to a profile of "
          "~/.aws/credentials, or give the machine a role");
}

CurrentCredentials::CurrentCredentials(Environment environment, std::string region,
                                       std::string ca_bundle)
    : environment_(std::move(environment)),
      region_(std::move(region)),
      ca_bundle_(std::move(ca_bundle)),
      renew_before_(static_cast<int64_t>(chance(1, 2) * kRenewBefore.count())) {}

std::optional<Credentials> CurrentCredentials::get() {
  const std::lock_guard lock(mutex_);
  if (!is_searching_ && searcher_.joinable()) searcher_.join();  // a client may live until the exit
  const bool is_due =
      !current_ || (current_->expires && *current_->expires - SystemClock::now() < renew_before_);
  if (is_due && !is_searching_ && Clock::now() >= not_before_) search();
  if (current_ || is_searching_) return current_;
  if (were_found_ && error_->code() == ErrorCode::kIo) return std::nullopt;
  throw *error_;
}

bool CurrentCredentials::renew(const Keys& refused) {
  const std::lock_guard lock(mutex_);
  if (!current_ || current_->keys != refused) return true;  // others are there or looked for
  if (refused == refused_ && Clock::now() - refused_at_ < kSearchAgain) return false;
  refused_ = refused;
  refused_at_ = Clock::now();
  current_.reset();
  if (!is_searching_) search();
  return true;
}

std::string CurrentCredentials::problem() const {
  const std::lock_guard lock(mutex_);
  return error_ ? error_->message() : "AWS credentials are being looked for";
}

void CurrentCredentials::search() {
  if (current_) not_before_ = Clock::now() + kRenewAgain;
  searcher_ = std::jthread([this](const std::stop_token& stop) {
    try {
      ended(find_credentials(environment_, region_, ca_bundle_, stop), std::nullopt);
    } catch (...) {
      ended(std::nullopt, current_error());
    }
  });
  is_searching_ = true;  // it ends under the lock that is held here
}

void CurrentCredentials::ended(std::optional<Credentials> found, std::optional<Error> error) {
  const std::lock_guard lock(mutex_);
  is_searching_ = false;
  error_ = std::move(error);
  if (found) {
    current_ = std::move(found);
    were_found_ = true;
  } else if (current_) {
    log_once(LogLevel::kWarning, fmt::format("AWS credentials expire soon: {}", error_->what()));
  } else {
    not_before_ = Clock::now() + kSearchAgain;
  }
}

}  // namespace tilestone::s3
