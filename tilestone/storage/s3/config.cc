#include "tilestone/storage/s3/config.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace {

// Where systems keep the certificates of authorities. A libcurl from another system looks
// elsewhere.
constexpr const char* kSystemBundles[] = {
    "/etc/ssl/certs/ca-certificates.crt",                 // Debian, Ubuntu, Arch
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  // Fedora, RHEL
    "/etc/pki/tls/certs/ca-bundle.crt",                   // older RHEL
    "/etc/ssl/ca-bundle.pem",                             // SUSE
    "/etc/ssl/cert.pem",                                  // Alpine
};

// The first text that is not empty.
std::string first_of(std::initializer_list<std::string> texts) {
  const auto* const found = std::ranges::find_if(texts, [](auto& text) { return !text.empty(); });
  return found == texts.end() ? "" : *found;
}

// The file that was set last. `file`: sets it.
std::string spare_bundle(const std::optional<std::string>& file = std::nullopt) {
  static auto& spare = *new std::pair<std::mutex, std::string>;  // never destroyed, as what uses it
  const std::lock_guard lock(spare.first);
  return file ? spare.second = *file : spare.second;
}

std::string system_bundle() {
  for (const char* const path : kSystemBundles) {
    if (::access(path, R_OK) == 0) return path;
  }
  return spare_bundle();
}

// Without slashes at its end.
std::string checked_endpoint(std::string endpoint) {
  endpoint = without_slash(std::move(endpoint));
  if (endpoint.empty()) return endpoint;
  const bool is_url = endpoint.starts_with("http://") || endpoint.starts_with("https://");
  if (!is_url || endpoint.find_first_of("@?#", 0) != std::string::npos ||
      endpoint.find('/', endpoint.find("//") + 2) != std::string::npos) {
    // The text itself is not shown, because it may contain a password.
    throw Error(ErrorCode::kInvalidArgument,
                "the endpoint of S3 is not a URL of the form https://host or https://host:port")
        .with_hint("look at AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and endpoint_url of the profile");
  }
  return endpoint;
}

void add_header(Config& config, std::string_view line) {
  const size_t colon = line.find(':');
  const std::string name = lower_case(trimmed(line.substr(0, colon)));
  if (colon == std::string_view::npos || !name.starts_with("x-amz-") ||
      name.find("customer") != std::string::npos) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} has something other than x-amz- headers in the form \"name: value\", "
                    "or a customer's key (SSE-C), which is not supported",
                    kHeadersVariable));
  }
  const bool always = name == "x-amz-request-payer" || name == "x-amz-expected-bucket-owner";
  (always ? config.every_request : config.new_object)[name] = trimmed(line.substr(colon + 1));
}

void add_headers(Config& config, std::string_view text) {
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(";\n"), text.size());
    const std::string_view line = trimmed(text.substr(0, end));
    if (!line.empty()) add_header(config, line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

}  // namespace

HttpSettings with_proxy(HttpSettings settings, const Environment& environment,
                        std::string_view url) {
  const auto get = [&](const char* name) { return setting(environment, name); };
  // A program that serves CGI may have HTTP_PROXY from a request's header.
  const std::string of_scheme = url.starts_with("http://")
                                    ? get("http_proxy")
                                    : first_of({get("https_proxy"), get("HTTPS_PROXY")});
  settings.proxy = first_of({of_scheme, get("all_proxy"), get("ALL_PROXY")});
  settings.no_proxy = first_of({get("no_proxy"), get("NO_PROXY")});
  return settings;
}

void set_spare_bundle(const std::string& file) { spare_bundle(file); }

Config config_from(Environment environment) {
  const auto get = [&](const char* name) { return setting(environment, name); };
  const Profile profile = read_profile(environment);
  const auto of_profile = [&](const char* name) { return setting(profile.config, name); };
  Config config;
  config.endpoint = checked_endpoint(first_of(
      {get("AWS_ENDPOINT_URL_S3"), get("AWS_ENDPOINT_URL"), of_profile("services.endpoint_url"),
       of_profile("s3.endpoint_url"), of_profile("endpoint_url")}));
  config.region =
      first_of({get("AWS_REGION"), get("AWS_DEFAULT_REGION"), of_profile("region"), "us-east-1"});
  const std::string style = of_profile("s3.addressing_style");
  config.path_style = style == "path" || (!config.endpoint.empty() && style != "virtual");
  config.ca_bundle = first_of(
      {get("AWS_CA_BUNDLE"), of_profile("ca_bundle"), get("SSL_CERT_FILE"), system_bundle()});
  add_headers(config, get(kHeadersVariable));
  config.environment = std::move(environment);
  return config;
}

}  // namespace tilestone::s3
