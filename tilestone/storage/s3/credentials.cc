#include "tilestone/storage/s3/credentials.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/answers.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace {

using SystemClock = std::chrono::system_clock;
using std::chrono::milliseconds;

constexpr std::chrono::minutes kRenewBefore{5};
constexpr std::chrono::minutes kRenewAgain{1};
constexpr int kAttempts = 3;
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

// An answer with status 200, after a few attempts.
HttpAnswer fetch_again(const HttpRequest& request, const HttpSettings& settings,
                       std::string_view source) {
  HttpAnswer answer;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (attempt > 0) std::this_thread::sleep_for(milliseconds(100 << attempt));
    answer = fetch(request, settings);
    if (answer.failure == Failure::kNone && answer.status == 200) return answer;
    if (answer.failure == Failure::kNone && answer.status / 100 == 4) break;
    if (answer.failure == Failure::kPermanent) break;
  }
  if (answer.failure != Failure::kNone) fail(source, answer.problem);
  const Refusal refusal = parse_refusal(answer.body);
  fail(source, fmt::format("status {} {} {}", answer.status, refusal.code, refusal.message));
}

std::optional<Credentials> from_environment(const Environment& environment) {
  const auto get = [&](const char* name) { return variable(environment, name).value_or(""); };
  return complete(
      {.keys = {get("AWS_ACCESS_KEY_ID"), get("AWS_SECRET_ACCESS_KEY"), get("AWS_SESSION_TOKEN")},
       .source = "the environment"});
}

// A form in the body, so that the token stands in no URL.
HttpRequest web_identity_request(const Environment& environment, const std::string& region,
                                 const Query& form, std::string& body) {
  const std::string host = region.starts_with("cn-") ? "amazonaws.com.cn" : "amazonaws.com";
  const std::string url = variable(environment, "AWS_ENDPOINT_URL_STS")
                              .value_or(fmt::format("https://sts.{}.{}", region, host));
  body = encoded_query(form);
  return {.method = "POST",
          .url = url + "/",
          .headers = {{"content-type", "application/x-www-form-urlencoded"}},
          .body = {as_bytes(body)}};
}

std::optional<Credentials> from_web_identity(const Environment& environment,
                                             const std::string& region,
                                             const std::string& ca_bundle, const std::string& file,
                                             const std::string& role, const std::string& session) {
  if (file.empty() || role.empty()) return std::nullopt;
  const std::string source = "web identity (STS)";
  const auto token = read_text(file);
  if (!token) fail(source, fmt::format("the token's file {} does not exist", file));
  std::string body;
  const HttpRequest request =
      web_identity_request(environment, region,
                           {{"Action", "AssumeRoleWithWebIdentity"},
                            {"Version", "2011-06-15"},
                            {"RoleArn", role},
                            {"RoleSessionName", session.empty() ? "tilestone" : session},
                            {"WebIdentityToken", std::string(trimmed(*token))}},
                           body);
  const HttpAnswer answer =
      fetch_again(request, {.ca_bundle = ca_bundle, .whole = milliseconds(5000)}, source);
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

// A setting of the profile without which its user would get another identity than they think.
void refuse_other_ways(const Profile& profile) {
  constexpr std::array kOthers = {"role_arn", "sso_session", "sso_start_url", "credential_process",
                                  "login_session"};
  for (const char* const name : kOthers) {
    if (!profile.config.contains(name) && !profile.credentials.contains(name)) continue;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the AWS profile {} gets its credentials by {}, which this client does "
                            "not do",
                            profile.name, name))
        .with_hint("run `aws configure export-credentials --format env` and export what it prints");
  }
}

std::optional<Credentials> from_profile(const Environment& environment, const std::string& region,
                                        const std::string& ca_bundle) {
  const Profile profile = read_profile(environment);
  const auto get = [&](const char* name) { return setting(profile.config, name); };
  if (auto found = from_section(profile.credentials,
                                fmt::format("profile {} of the credentials file", profile.name))) {
    return found;
  }
  if (auto found = from_web_identity(environment, region, ca_bundle, get("web_identity_token_file"),
                                     get("role_arn"), get("role_session_name"))) {
    return found;
  }
  if (auto found = from_section(profile.config,
                                fmt::format("profile {} of the config file", profile.name))) {
    return found;
  }
  refuse_other_ways(profile);
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

std::optional<Credentials> from_container(const Environment& environment,
                                          const std::string& ca_bundle) {
  const std::string source = "the container's endpoint";
  const auto relative = variable(environment, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
  const auto full = variable(environment, "AWS_CONTAINER_CREDENTIALS_FULL_URI");
  if (!relative && !full) return std::nullopt;
  const std::string url = relative ? kContainerHost + *relative : *full;
  if (!may_receive_token(url) || url.find('@') != std::string::npos) {
    fail(source, "its URL is neither https nor on this machine");
  }
  std::string token = variable(environment, "AWS_CONTAINER_AUTHORIZATION_TOKEN").value_or("");
  if (const auto file = variable(environment, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")) {
    token = trimmed(read_text(*file).value_or(""));
  }
  HttpRequest request = {.method = "GET", .url = url, .headers = {}};
  if (!token.empty()) request.headers["authorization"] = token;
  const HttpSettings settings = {
      .ca_bundle = ca_bundle, .whole = milliseconds(2000), .proxies = false};
  return parse_json(fetch_again(request, settings, source).body, source);
}

// IMDSv2: a token first, then the role's name, then its credentials.
std::optional<Credentials> from_instance(const Environment& environment) {
  const std::string disabled = variable(environment, "AWS_EC2_METADATA_DISABLED").value_or("");
  if (lower_case(disabled) == "true") return std::nullopt;
  const std::string source = "the instance's metadata (IMDSv2)";
  const std::string host =
      variable(environment, "AWS_EC2_METADATA_SERVICE_ENDPOINT").value_or(kInstanceHost);
  const HttpSettings settings = {
      .connect = milliseconds(1000), .whole = milliseconds(2000), .proxies = false};
  const HttpAnswer token = fetch({.method = "PUT",
                                  .url = host + "/latest/api/token",
                                  .headers = {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}}},
                                 settings);
  if (token.failure != Failure::kNone) return std::nullopt;  // this machine is no instance
  if (token.status != 200) fail(source, fmt::format("status {} for a token", token.status));
  const Headers headers = {{"x-aws-ec2-metadata-token", token.body}};
  const std::string list = host + "/latest/meta-data/iam/security-credentials/";
  const std::string roles =
      fetch_again({.method = "GET", .url = list, .headers = headers}, settings, source).body;
  const std::string role(trimmed(roles.substr(0, roles.find('\n'))));
  if (role.empty()) fail(source, "the instance has no role");
  const HttpRequest request = {
      .method = "GET", .url = list + encoded_path(role), .headers = headers};
  return parse_json(fetch_again(request, settings, source).body, source);
}

}  // namespace

Credentials find_credentials(const Environment& environment, const std::string& region,
                             const std::string& ca_bundle) {
  if (auto found = from_environment(environment)) return *found;
  const auto get = [&](const char* name) { return variable(environment, name).value_or(""); };
  if (auto found =
          from_web_identity(environment, region, ca_bundle, get("AWS_WEB_IDENTITY_TOKEN_FILE"),
                            get("AWS_ROLE_ARN"), get("AWS_ROLE_SESSION_NAME"))) {
    return *found;
  }
  if (auto found = from_profile(environment, region, ca_bundle)) return *found;
  if (auto found = from_container(environment, ca_bundle)) return *found;
  if (auto found = from_instance(environment)) return *found;
  throw Error(ErrorCode::kNotFound, "no AWS credentials were found")
      .with_hint(
          "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE to a profile of "
          "~/.aws/credentials, or give the machine a role");
}

CurrentCredentials::CurrentCredentials(Environment environment, std::string region,
                                       std::string ca_bundle)
    : environment_(std::move(environment)),
      region_(std::move(region)),
      ca_bundle_(std::move(ca_bundle)) {}

bool CurrentCredentials::is_due() const {
  const auto now = SystemClock::now();
  return current_->expires && *current_->expires - now < kRenewBefore && now >= not_before_;
}

const Credentials& CurrentCredentials::get() {
  if (!current_) {
    current_ = find_credentials(environment_, region_, ca_bundle_);
  } else if (is_due()) {
    not_before_ = SystemClock::now() + kRenewAgain;
    try {
      current_ = find_credentials(environment_, region_, ca_bundle_);
    } catch (const Error& error) {
      if (*current_->expires <= SystemClock::now()) throw;
      log_once(LogLevel::kWarning, fmt::format("AWS credentials expire soon: {}", error.what()));
    }
  }
  return *current_;
}

bool CurrentCredentials::renew(Keys refused) {
  // Another request may have renewed them.
  if (!current_ || current_->keys == refused) {
    current_ = find_credentials(environment_, region_, ca_bundle_);
  }
  return current_->keys != refused;
}

}  // namespace tilestone::s3
