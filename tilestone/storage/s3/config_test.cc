#include "tilestone/storage/s3/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tilestone/base/error_testing.h"

namespace tilestone::s3 {
namespace config_test {

using testing::ElementsAre;
using testing::Pair;

class ConfigTest : public testing::Test {
 protected:
  ConfigTest() {
    folder_ = testing::TempDir() + "s3_config_" + std::to_string(::getpid());
    std::filesystem::create_directories(folder_ + "/.aws");
  }
  ~ConfigTest() override { std::filesystem::remove_all(folder_); }

  // With HOME, where the files are.
  Environment with(Environment environment) {
    environment["HOME"] = folder_;
    return environment;
  }
  void write_config(const std::string& text) { std::ofstream(folder_ + "/.aws/config") << text; }

  std::string folder_;
};

TEST(Sections, AsAwsWritesThem) {
  const Sections found = parse_sections(
      "stray = 1\n"
      "# a comment\n"
      "[default]\r\n"
      "Region=eu-west-1 # of the office\n"
      "secret = a#b;c=\n"
      "[profile  two words ]\n"
      "s3 =\n"
      "  addressing_style = path\n"
      "\tuse = x\n"
      "region = us-west-2\n"
      "not a setting\n");
  EXPECT_THAT(
      found,
      ElementsAre(
          Pair("default", ElementsAre(Pair("region", "eu-west-1"), Pair("secret", "a#b;c="))),
          Pair("profile two words",
               ElementsAre(Pair("region", "us-west-2"), Pair("s3", ""),
                           Pair("s3.addressing_style", "path"), Pair("s3.use", "x")))));
}

TEST_F(ConfigTest, WithoutAnythingItIsAws) {
  const Config config = config_from(with({}));
  EXPECT_EQ(config.endpoint, "");
  EXPECT_EQ(config.region, "us-east-1");
  EXPECT_FALSE(config.path_style);
}

TEST_F(ConfigTest, VariablesComeBeforeTheProfile) {
  write_config(
      "[profile lab]\nregion = eu-central-1\nendpoint_url = http://profile:1\nca_bundle = /p.crt\n"
      "[services x]\ns3 =\n  endpoint_url = http://services:2/\n"
      "[profile other]\nservices = x\ns3 =\n  addressing_style = virtual\n");
  Config config = config_from(with({{"AWS_PROFILE", "lab"}}));
  EXPECT_EQ(config.region, "eu-central-1");
  EXPECT_EQ(config.endpoint, "http://profile:1");
  EXPECT_EQ(config.ca_bundle, "/p.crt");
  EXPECT_TRUE(config.path_style);
  config = config_from(with({{"AWS_PROFILE", "lab"},
                             {"AWS_DEFAULT_REGION", "d"},
                             {"AWS_REGION", "r"},
                             {"AWS_ENDPOINT_URL", "http://all:3"},
                             {"AWS_ENDPOINT_URL_S3", "https://s3:4/"},
                             {"AWS_CA_BUNDLE", "/v.crt"}}));
  EXPECT_EQ(config.region, "r");
  EXPECT_EQ(config.endpoint, "https://s3:4");
  EXPECT_EQ(config.ca_bundle, "/v.crt");
  config = config_from(with({{"AWS_PROFILE", "other"}}));
  EXPECT_EQ(config.endpoint, "http://services:2");
  EXPECT_FALSE(config.path_style);
}

TEST_F(ConfigTest, ProfileThatDoesNotExistIsAnError) {
  EXPECT_THAT(error_of([&] { config_from(with({{"AWS_PROFILE", "gone"}})); }),
              IsError(ErrorCode::kNotFound, "", "gone"));
}

TEST(ProcessEnvironment, WithoutHomeTheUsersIsTaken) {
  const std::string before = std::getenv("HOME");
  ::unsetenv("HOME");
  const Environment environment = process_environment();
  ::setenv("HOME", before.c_str(), 1);
  EXPECT_EQ(environment.at("HOME"), ::getpwuid(::geteuid())->pw_dir);
}

// As HOME is another user's in many containers.
TEST_F(ConfigTest, FilesThatMayNotBeReadAreEmptyUnlessAVariableNamesThem) {
  write_config("[default]\nregion = home\n");
  EXPECT_EQ(config_from(with({{"AWS_CONFIG_FILE", "~/.aws/config"}})).region, "home");
  EXPECT_EQ(error_of([&] { config_from(with({{"AWS_CONFIG_FILE", folder_}})); }).code(),
            ErrorCode::kIo);
  std::filesystem::permissions(folder_, std::filesystem::perms::none);
  const uid_t user = ::geteuid();
  ASSERT_EQ(::seteuid(user == 0 ? 65534 : user), 0);
  EXPECT_EQ(config_from(with({})).region, "us-east-1");
  EXPECT_EQ(
      error_of([&] { config_from(with({{"AWS_CONFIG_FILE", folder_ + "/.aws/config"}})); }).code(),
      ErrorCode::kIo);
  ASSERT_EQ(::seteuid(user), 0);
  std::filesystem::permissions(folder_, std::filesystem::perms::owner_all);
}

TEST_F(ConfigTest, EndpointsThatAreNoneAreRefusedWithoutBeingShown) {
  for (const char* const url : {"host:9000", "https://user:canary@host", "s3://canary",
                                "http://host/canary", "http://host?canary"}) {
    const Error error = error_of([&] { config_from(with({{"AWS_ENDPOINT_URL", url}})); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << url;
    EXPECT_EQ(std::string(error.what()).find("canary"), std::string::npos) << url;
  }
}

TEST_F(ConfigTest, HeadersGoWithTheRequestsThatTheyAreFor) {
  const Config config = config_from(
      with({{kHeadersVariable,
             "X-Amz-Request-Payer: requester;\n x-amz-server-side-encryption : aws:kms ;"}}));
  EXPECT_THAT(config.every_request, ElementsAre(Pair("x-amz-request-payer", "requester")));
  EXPECT_THAT(config.new_object, ElementsAre(Pair("x-amz-server-side-encryption", "aws:kms")));
  for (const char* const text :
       {"authorization: x", "x-amz-acl", "x-amz-server-side-encryption-customer-key: canary"}) {
    const Error error = error_of([&] { config_from(with({{kHeadersVariable, text}})); });
    EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "", kHeadersVariable));
    EXPECT_EQ(std::string(error.what()).find("canary"), std::string::npos);
  }
}

}  // namespace config_test
}  // namespace tilestone::s3
