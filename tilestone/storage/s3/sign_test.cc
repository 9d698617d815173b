#include "tilestone/storage/s3/sign.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/url_text.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace sign_test {

using testing::EndsWith;
using testing::HasSubstr;

constexpr std::string_view kEmptyHash =
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
// 2013-05-24 00:00:00 UTC, the time of AWS's examples.
const auto kExampleTime = std::chrono::system_clock::from_time_t(1369353600);
const Keys kExampleKeys = {"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};

std::string signature_of(std::string_view method, std::string_view path, const Query& query,
                         Headers headers, std::string_view hash = kEmptyHash) {
  headers["host"] = "examplebucket.s3.amazonaws.com";
  sign(headers, method, path, query, kExampleKeys, "us-east-1", kExampleTime, hash);
  const std::string& line = headers.at("authorization");
  return line.substr(line.find("Signature=") + 10);
}

// "Examples: Signature Calculations" in the S3 API reference.
TEST(Sign, AsInTheExamplesThatAwsPublishes) {
  EXPECT_EQ(signature_of("GET", "/test.txt", {}, {{"range", "bytes=0-9"}}),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
  EXPECT_EQ(signature_of("PUT", "/test$file.text", {},
                         {{"date", "Fri, 24 May 2013 00:00:00 GMT"},
                          {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
                         "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
  EXPECT_EQ(signature_of("GET", "/", {{"lifecycle", ""}}, {}),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
  EXPECT_EQ(signature_of("GET", "/", {{"prefix", "J"}, {"max-keys", "2"}}, {}),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

TEST(Sign, EncodesEachByteOfAKeyOnceAndNormalisesNothing) {
  EXPECT_EQ(encoded_path("/a b+c//d/../%41/\xc3\xa9=:~'"),
            "/a%20b%2Bc//d/../%2541/%C3%A9%3D%3A~%27");
  EXPECT_EQ(encoded_query({{"prefix", "a/b c"}, {"list-type", "2"}, {"prefi", "x"}}),
            "list-type=2&prefi=x&prefix=a%2Fb%20c");
}

TEST(Sign, SessionTokenIsSigned) {
  Headers headers = {{"host", "h"}};
  sign(headers, "GET", "/", {}, {"id", "secret", "token"}, "eu-west-1", kExampleTime);
  EXPECT_EQ(headers.at("x-amz-security-token"), "token");
  EXPECT_EQ(headers.at("x-amz-content-sha256"), kUnsignedPayload);
  EXPECT_THAT(
      headers.at("authorization"),
      HasSubstr("SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token,"));
  EXPECT_THAT(headers.at("authorization"), HasSubstr("/20130524/eu-west-1/s3/aws4_request"));
}

TEST(Sign, SpacesInHeadersAreFolded) {
  EXPECT_EQ(signature_of("GET", "/k", {}, {{"x-amz-meta-a", "  b   c "}}),
            signature_of("GET", "/k", {}, {{"x-amz-meta-a", "b c"}}));
}

TEST(Encode, TextsAsHttpAndS3WriteThem) {
  EXPECT_EQ(url_decode("a%20b+c%2B%2f%C3%A9%zz%4"), "a b c+/\xc3\xa9%zz%4");
  EXPECT_EQ(base64(as_bytes("ab")), "YWI=");
  EXPECT_EQ(base64({}), "");
  EXPECT_EQ(base64_crc32(0xcbf43926), "y/Q5Jg==");  // of "123456789"
  EXPECT_EQ(lower_case("X-Amz-Été"), "x-amz-Été");
  EXPECT_EQ(trimmed(" \t "), "");
}

}  // namespace sign_test
}  // namespace tilestone::s3
