// AWS Signature Version 4, in the headers of a request: pure functions.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tilestone::s3 {

// Header names are in lower case.
using Headers = std::map<std::string, std::string>;
// Not encoded. In any order; a parameter without a value has the value "".
using Query = std::vector<std::pair<std::string, std::string>>;

struct Keys {
  std::string id;
  std::string secret;
  std::string session_token;  // "": none

  bool operator==(const Keys&) const = default;
};

inline constexpr std::string_view kUnsignedPayload = "UNSIGNED-PAYLOAD";

// A path as S3 signs and receives it: each byte is encoded once, but "/". Nothing is normalised.
std::string encoded_path(std::string_view path);
// "a=1&b=", sorted as the signature needs it.
std::string encoded_query(const Query& query);

// Adds x-amz-date, x-amz-content-sha256, x-amz-security-token and authorization to `headers`, which
// must have `host`. All of them are signed. path: not encoded, begins with "/".
// payload_hash: SHA-256 of the body in hex, or kUnsignedPayload.
void sign(Headers& headers, std::string_view method, std::string_view path, const Query& query,
          const Keys& keys, std::string_view region, std::chrono::system_clock::time_point now,
          std::string_view payload_hash = kUnsignedPayload);

}  // namespace tilestone::s3
