#include <fmt/chrono.h>
#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>

#include "tilestone/base/error.h"
#include "tilestone/base/sha256.h"
#include "tilestone/base/url_text.h"
#include "tilestone/storage/s3/encode.h"
#include "tilestone/storage/s3/sign.h"

namespace tilestone::s3 {
namespace {

Bytes hmac_sha256(ByteView key, std::string_view text) {
  Bytes out(EVP_MAX_MD_SIZE);
  unsigned size = 0;
  const unsigned char* const made =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(text.data()), text.size(),
           reinterpret_cast<unsigned char*>(out.data()), &size);
  if (made == nullptr) throw Error(ErrorCode::kInternal, "OpenSSL can't compute HMAC-SHA256");
  out.resize(size);
  return out;
}

std::string sha256_hex(std::string_view text) {
  Sha256 hash;
  hash.add(as_bytes(text));
  return hash.hex();
}

// A header's value with outer spaces removed, and inner ones as a single space.
std::string canonical_value(std::string_view value) {
  std::string out;
  for (const char c : trimmed(value)) {
    if (c != ' ' || out.back() != ' ') out += c;
  }
  return out;
}

// The canonical headers, each on a line, and their names.
std::pair<std::string, std::string> canonical_headers(const Headers& headers) {
  std::string lines, names;
  for (const auto& [name, value] : headers) {
    lines += fmt::format("{}:{}\n", name, canonical_value(value));
    names += (names.empty() ? "" : ";") + name;
  }
  return {lines, names};
}

Bytes signing_key(std::string_view secret, std::string_view day, std::string_view region) {
  Bytes key = to_bytes(fmt::format("AWS4{}", secret));
  for (const std::string_view step :
       {day, region, std::string_view("s3"), std::string_view("aws4_request")}) {
    key = hmac_sha256(key, step);
  }
  return key;
}

}  // namespace

std::string encoded_path(std::string_view path) { return url_encode(path, "/"); }

std::string encoded_query(const Query& query) {
  std::vector<std::string> parameters;
  for (const auto& [name, value] : query) {
    parameters.push_back(url_encode(name) + "=" + url_encode(value));
  }
  std::ranges::sort(parameters);
  return fmt::format("{}", fmt::join(parameters, "&"));
}

void sign(Headers& headers, std::string_view method, std::string_view path, const Query& query,
          const Keys& keys, std::string_view region, std::chrono::system_clock::time_point now,
          std::string_view payload_hash) {
  const std::string time =
      fmt::format("{:%Y%m%dT%H%M%SZ}", fmt::gmtime(std::chrono::system_clock::to_time_t(now)));
  const std::string scope =
      fmt::format("{}/{}/s3/aws4_request", std::string_view(time).substr(0, 8), region);
  headers["x-amz-date"] = time;
  headers["x-amz-content-sha256"] = payload_hash;
  if (!keys.session_token.empty()) headers["x-amz-security-token"] = keys.session_token;
  const auto [lines, names] = canonical_headers(headers);
  const std::string request = fmt::format("{}\n{}\n{}\n{}\n{}\n{}", method, encoded_path(path),
                                          encoded_query(query), lines, names, payload_hash);
  const std::string to_sign =
      fmt::format("AWS4-HMAC-SHA256\n{}\n{}\n{}", time, scope, sha256_hex(request));
  const Bytes key = signing_key(keys.secret, std::string_view(time).substr(0, 8), region);
  headers["authorization"] =
      fmt::format("AWS4-HMAC-SHA256 Credential={}/{},SignedHeaders={},Signature={}", keys.id, scope,
                  names, hex(hmac_sha256(key, to_sign)));
}

}  // namespace tilestone::s3
