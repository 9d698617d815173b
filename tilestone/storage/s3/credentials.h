// Where AWS's credentials come from, and when they are renewed. Neither an Error nor the log has a
// key, a token or a body of an answer that contained one.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "tilestone/storage/s3/http.h"
#include "tilestone/storage/s3/profiles.h"

namespace tilestone::s3 {

struct Credentials {
  Keys keys;
  std::optional<std::chrono::system_clock::time_point> expires = {};
  std::string source = {};  // in words: "the environment"
};

// Looks in this order: the environment (AWS_ACCESS_KEY_ID), its web identity
// (AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN), the profile in the credentials file and in the
// config file (keys, or web_identity_token_file and role_arn), the container's endpoint
// (AWS_CONTAINER_CREDENTIALS_RELATIVE_URI, _FULL_URI), the instance's (IMDSv2, unless
// AWS_EC2_METADATA_DISABLED). Error(kNotFound) if there are none, kUnsupported if the profile wants
// another way (SSO, credential_process, a role by other credentials), kIo if an endpoint fails.
// Waits for the network: at most about 20 seconds.
Credentials find_credentials(const Environment& environment, const std::string& region,
                             const std::string& ca_bundle);

// The credentials in use. Not thread-safe.
class CurrentCredentials {
 public:
  CurrentCredentials(Environment environment, std::string region, std::string ca_bundle);

  // Found at the first call, and again from five minutes before they expire. Those that could not
  // be renewed serve until they expire, and are looked for again after a minute.
  const Credentials& get();
  // After a server has called these keys expired: whether others are found now.
  bool renew(Keys refused);

 private:
  bool is_due() const;

  const Environment environment_;
  const std::string region_, ca_bundle_;
  std::optional<Credentials> current_;
  std::chrono::system_clock::time_point not_before_{};  // the next attempt to renew
};

}  // namespace tilestone::s3
