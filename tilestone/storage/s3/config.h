// How a bucket is reached, as AWS's tools are configured.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

#include "tilestone/storage/s3/http.h"
#include "tilestone/storage/s3/profiles.h"
#include "tilestone/storage/s3/sign.h"

namespace tilestone::s3 {

// Headers that a bucket's policy demands, "name: value" separated by ";" or line breaks:
// "x-amz-server-side-encryption: aws:kms; x-amz-request-payer: requester". Only names that begin
// with x-amz-. x-amz-request-payer and x-amz-expected-bucket-owner are sent with each request, all
// others (encryption, storage class, ACL, tagging) with those that begin an object. Keys of
// customers (SSE-C) are not supported.
inline constexpr const char* kHeadersVariable = "TILESTONE_S3_HEADERS";

struct Config {
  Environment environment;  // from which credentials are found
  std::string endpoint;     // "http://127.0.0.1:9000"; "": AWS's own
  std::string region;       // where requests go first; a bucket's own answer corrects it
  bool path_style = false;  // "https://host/bucket/key" for every bucket
  std::string ca_bundle;    // a file of certificates; "": libcurl's default
  Headers every_request;    // of kHeadersVariable
  Headers new_object;       // of kHeadersVariable

  size_t in_progress = 32;  // requests at once
  // The pause before the second attempt of a request. Each further pause is twice as long, up to
  // longest_pause, and is shortened by chance to between a half and the whole.
  std::chrono::milliseconds first_pause{100};
  std::chrono::milliseconds longest_pause{10'000};
  // An endpoint that has never answered is given up after this time.
  std::chrono::milliseconds first_contact{15'000};
  std::chrono::milliseconds connect{10'000};  // to resolve the name and connect
  std::chrono::seconds stall{60};             // a connection without a byte for so long is given up
};

// With the proxy for `url`: http_proxy or https_proxy, all_proxy, no_proxy.
HttpSettings with_proxy(HttpSettings settings, const Environment& environment,
                        std::string_view url);

// For a system that has no file of certificates. The configurations that follow may name it.
void set_spare_bundle(const std::string& file);

// From AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION, AWS_CA_BUNDLE,
// SSL_CERT_FILE and the profile (endpoint_url, region, ca_bundle, s3.addressing_style). The region
// is "us-east-1" if nothing says. Error(kInvalidArgument) for an endpoint that is no http(s) URL or
// contains a password, and for headers that are not as above.
Config config_from(Environment environment);

}  // namespace tilestone::s3
