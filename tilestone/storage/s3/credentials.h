// Where AWS's credentials come from, and when they are renewed. Neither an Error nor the log has a
// key, a token or a body of an answer that contained one.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>

#include "tilestone/base/error.h"
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
// another way (SSO, credential_process, a role by other credentials), kIo if an endpoint fails for
// 15 seconds. A stop ends it within a second or two.
Credentials find_credentials(const Environment& environment, const std::string& region,
                             const std::string& ca_bundle, const std::stop_token& stop = {});

// The credentials in use, which are looked for on a thread of their own. Thread-safe.
class CurrentCredentials {
 public:
  CurrentCredentials(Environment environment, std::string region, std::string ca_bundle);

  // nullopt: they are being looked for. Between 10 and 5 minutes before they expire new ones are
  // looked for, once a minute. Throws what the last search has thrown, if it was not longer ago
  // than five seconds; but an endpoint that fails after credentials were found may come back, so
  // its Error(kIo) means: not yet.
  std::optional<Credentials> get();
  // After a server has called these keys expired: looks for others, unless that was just done.
  bool renew(const Keys& refused);
  // Why there are none, in words.
  std::string problem() const;

 private:
  void search();
  void ended(std::optional<Credentials> found, std::optional<Error> error);

  const Environment environment_;
  const std::string region_, ca_bundle_;
  const std::chrono::seconds renew_before_;
  mutable std::mutex mutex_;  // guards the following
  std::optional<Credentials> current_;
  std::optional<Error> error_;  // of the last search
  Keys refused_;
  bool were_found_ = false, is_searching_ = false;
  std::chrono::steady_clock::time_point not_before_;  // the next search by get()
  std::chrono::steady_clock::time_point refused_at_;
  std::jthread searcher_;  // the last, so that it ends first
};

}  // namespace tilestone::s3
