#include "tilestone/storage/s3/credentials.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tilestone/base/error_testing.h"
#include "tilestone/storage/s3/local_server_testing.h"

namespace tilestone::s3 {
namespace credentials_test {

using testing::HasSubstr;
using testing::Not;

class CredentialsTest : public testing::Test {
 protected:
  CredentialsTest() {
    folder_ = testing::TempDir() + "s3_credentials_" + std::to_string(::getpid());
    std::filesystem::create_directories(folder_ + "/.aws");
  }
  ~CredentialsTest() override { std::filesystem::remove_all(folder_); }

  // Without the instance's endpoint, unless the test names one.
  Environment with(Environment environment) const {
    environment["HOME"] = folder_;
    environment.emplace("AWS_EC2_METADATA_DISABLED", "true");
    return environment;
  }
  Credentials find(const Environment& environment) const {
    return find_credentials(with(environment), "eu-west-1", "");
  }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
    return folder_ + "/" + name;
  }

  std::string folder_;
};

// Of an endpoint that answers.
Credentials wait_for(CurrentCredentials& current) {
  while (true) {
    if (const auto found = current.get()) return *found;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::string json_with(const std::string& id, const std::string& expiration) {
  return "{\"Code\": \"Success\", \"AccessKeyId\": \"" + id +
         "\", \"SecretAccessKey\": \"secret\", \"Token\": \"token\", \"Expiration\": \"" +
         expiration + "\"}";
}

TEST_F(CredentialsTest, EnvironmentComesFirst) {
  write(".aws/credentials", "[default]\naws_access_key_id = F\naws_secret_access_key = f\n");
  EXPECT_EQ(
      find({{"AWS_ACCESS_KEY_ID", "E"}, {"AWS_SECRET_ACCESS_KEY", "e"}, {"AWS_SESSION_TOKEN", "t"}})
          .keys,
      (Keys{"E", "e", "t"}));
  EXPECT_EQ(find({{"AWS_ACCESS_KEY_ID", "E"}}).keys, (Keys{"F", "f", ""}));
}

TEST_F(CredentialsTest, ProfilesOfBothFiles) {
  write(".aws/config",
        "[profile b]\naws_access_key_id=B\naws_secret_access_key=b\naws_session_token=s\n"
        "[profile c]\nsso_session = x\n[profile a]\nregion = r\n"
        "[profile d]\nrole_arn = x\nsource_profile = a\n");
  write(".aws/credentials",
        "[a]\naws_access_key_id = A\naws_secret_access_key = a/+=\n"
        "[d]\naws_access_key_id = A\naws_secret_access_key = a\n");
  EXPECT_EQ(find({{"AWS_PROFILE", "a"}}).keys, (Keys{"A", "a/+=", ""}));
  EXPECT_EQ(find({{"AWS_PROFILE", "b"}}).keys, (Keys{"B", "b", "s"}));
  EXPECT_THAT(error_of([&] { find({{"AWS_PROFILE", "c"}}); }),
              IsError(ErrorCode::kUnsupported, "", "c", "sso_session"));
  EXPECT_THAT(error_of([&] { find({{"AWS_PROFILE", "d"}}); }),
              IsError(ErrorCode::kUnsupported, "", "d", "role_arn"));
}

TEST_F(CredentialsTest, NoneAreAnErrorThatSaysWhatToDo) {
  const Error error = error_of([&] { find({}); });
  EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  EXPECT_THAT(error.hint(), HasSubstr("AWS_ACCESS_KEY_ID"));
}

// Until then it throttles.
TEST_F(CredentialsTest, WebIdentitySendsItsTokenInTheBody) {
  ServedRequest seen;
  int calls = 0;
  LocalServer sts([&](const ServedRequest& request) {
    seen = request;
    if (++calls == 1) return refusal(400, "Throttling");
    return ServedAnswer{.body =
                            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult>"
                            "<Credentials><AccessKeyId>W</AccessKeyId><SecretAccessKey>w"
                            "</SecretAccessKey><SessionToken>t</SessionToken><Expiration>"
                            "2033-01-02T03:04:05Z</Expiration></Credentials>"
                            "</AssumeRoleWithWebIdentityResult>"
                            "</AssumeRoleWithWebIdentityResponse>"};
  });
  const std::string file = write("token", "jwt.canary\n");
  const Credentials found = find({{"AWS_WEB_IDENTITY_TOKEN_FILE", file},
                                  {"AWS_ROLE_ARN", "arn:aws:iam::1:role/r"},
                                  {"AWS_ENDPOINT_URL", sts.url() + "/"}});
  EXPECT_EQ(found.keys, (Keys{"W", "w", "t"}));
  EXPECT_EQ(std::chrono::system_clock::to_time_t(*found.expires), 1988247845);
  EXPECT_EQ(seen.target, "/");
  EXPECT_THAT(seen.body, HasSubstr("WebIdentityToken=jwt.canary"));
  EXPECT_THAT(seen.body, HasSubstr("RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fr"));
}

TEST_F(CredentialsTest, RefusedWebIdentityDoesNotShowItsToken) {
  LocalServer sts([](const ServedRequest&) {
    return ServedAnswer{.status = 400,
                        .body =
                            "<ErrorResponse><Error><Code>ExpiredTokenException</Code></Error>"
                            "</ErrorResponse>"};
  });
  const Error error = error_of([&] {
    find({{"AWS_WEB_IDENTITY_TOKEN_FILE", write("token", "canary")},
          {"AWS_ROLE_ARN", "r"},
          {"AWS_ENDPOINT_URL_STS", sts.url()}});
  });
  EXPECT_THAT(error.what(), HasSubstr("400 ExpiredTokenException"));
  EXPECT_THAT(error.what(), Not(HasSubstr("canary")));
}

TEST_F(CredentialsTest, ContainersEndpointGetsTheTokenOfTheFile) {
  ServedRequest seen;
  LocalServer server([&](const ServedRequest& request) {
    seen = request;
    return ServedAnswer{.body = json_with("C", "2033-01-02T03:04:05.678Z")};
  });
  const Credentials found =
      find({{"AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url() + "/v1/creds?a=b"},
            {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", write("auth", "Bearer x\n")},
            {"http_proxy", "http://127.0.0.1:1"}});
  EXPECT_EQ(found.keys, (Keys{"C", "secret", "token"}));
  EXPECT_EQ(seen.target, "/v1/creds?a=b");
  EXPECT_EQ(seen.headers["authorization"], "Bearer x");
  for (const char* const url :
       {"http://10.0.0.1/x", "http://127.0.0.1.evil/x", "http://127.0.0.1@evil/"}) {
    EXPECT_EQ(error_of([&] { find({{"AWS_CONTAINER_CREDENTIALS_FULL_URI", url}}); }).code(),
              ErrorCode::kIo)
        << url;
  }
}

// Proxies are for the world outside.
TEST_F(CredentialsTest, InstanceIsAskedWithATokenAndNeverByAProxy) {
  std::vector<std::string> seen;
  LocalServer server([&](const ServedRequest& request) {
    const auto token = request.headers.find("x-aws-ec2-metadata-token");
    seen.push_back(request.method + " " + request.target +
                   (token == request.headers.end() ? "" : " " + token->second));
    if (request.method == "PUT") return ServedAnswer{.body = "TOKEN"};
    if (request.target.ends_with("/")) return ServedAnswer{.body = "role a\n"};
    return ServedAnswer{.body = json_with("I", "2033-01-02T03:04:05Z")};
  });
  const Credentials found = find({{"http_proxy", "http://127.0.0.1:1"},
                                  {"AWS_EC2_METADATA_DISABLED", "false"},
                                  {"AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url()}});
  EXPECT_EQ(found.keys.id, "I");
  const std::string list = "/latest/meta-data/iam/security-credentials/";
  EXPECT_THAT(seen, testing::ElementsAre("PUT /latest/api/token", "GET " + list + " TOKEN",
                                         "GET " + list + "role%20a TOKEN"));
}

TEST_F(CredentialsTest, AnotherCloudsMetadataIsNoInstance) {
  std::string path;
  LocalServer server([&](const ServedRequest& request) {
    return request.target == path ? ServedAnswer{.status = 404} : ServedAnswer{.body = "TOKEN"};
  });
  for (const char* const each :
       {"/latest/api/token", "/latest/meta-data/iam/security-credentials/"}) {
    path = each;
    EXPECT_EQ(error_of([&] {
                find({{"AWS_EC2_METADATA_DISABLED", "false"},
                      {"AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url() + "/"}});
              }).code(),
              ErrorCode::kNotFound)
        << each;
  }
}

TEST_F(CredentialsTest, AreRenewedBeforeTheyExpireAndKeptIfThatFails) {
  int calls = 0;
  bool fails = false;
  const auto soon = std::chrono::system_clock::now() + std::chrono::minutes(3);
  char time[32];
  const std::time_t seconds = std::chrono::system_clock::to_time_t(soon);
  std::strftime(time, sizeof time, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&seconds));
  LocalServer server([&](const ServedRequest&) {
    ++calls;
    if (fails) return ServedAnswer{.status = 400};
    return ServedAnswer{.body = json_with("C" + std::to_string(calls), time)};
  });
  CurrentCredentials current(with({{"AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url() + "/"}}),
                             "r", "");
  EXPECT_EQ(wait_for(current).keys.id, "C1");
  while (wait_for(current).keys.id == "C1") {  // they expire in less than five minutes
  }
  EXPECT_EQ(wait_for(current).keys.id, "C2");  // not again within a minute
  EXPECT_TRUE(current.renew(wait_for(current).keys));
  EXPECT_EQ(wait_for(current).keys.id, "C3");
  EXPECT_TRUE(current.renew({"C2", "secret", "token"}));  // another request has renewed them
  EXPECT_EQ(calls, 3);
  fails = true;
  EXPECT_TRUE(current.renew(wait_for(current).keys));
  while (current.problem().find("status 400") == std::string::npos) std::this_thread::yield();
  EXPECT_FALSE(current.get());  // the endpoint may come back
}

TEST_F(CredentialsTest, StaticOnesCannotBeRenewed) {
  CurrentCredentials current(with({{"AWS_ACCESS_KEY_ID", "E"}, {"AWS_SECRET_ACCESS_KEY", "e"}}),
                             "r", "");
  const Keys keys = wait_for(current).keys;
  EXPECT_TRUE(current.renew(keys));
  EXPECT_EQ(wait_for(current).keys, keys);
  EXPECT_FALSE(current.renew(keys));
}

TEST_F(CredentialsTest, SearchThatFoundNoneIsAnErrorForAll) {
  CurrentCredentials current(with({}), "r", "");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(error_of([&] { wait_for(current); }).code(), ErrorCode::kNotFound);
  }
}

}  // namespace credentials_test
}  // namespace tilestone::s3
