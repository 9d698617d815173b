#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tilestone/base/error_testing.h"
#include "tilestone/storage/s3/client.h"
#include "tilestone/storage/s3/local_server_testing.h"

namespace tilestone::s3 {
namespace attempts_test {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

Config quick_config(const std::string& endpoint) {
  Config config = config_from({{"AWS_ACCESS_KEY_ID", "AKIDCANARY"},
                               {"AWS_SECRET_ACCESS_KEY", "SECRETCANARY"},
                               {"AWS_SESSION_TOKEN", "TOKENCANARY"},
                               {"AWS_ENDPOINT_URL", endpoint}});
  config.first_pause = milliseconds(1);
  config.longest_pause = milliseconds(4);
  return config;
}

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

// Answers one after the other, the last one again and again. Keeps what was asked.
class Script {
 public:
  explicit Script(std::vector<ServedAnswer> answers)
      : answers_(std::move(answers)), server_([this](const ServedRequest& request) {
          const std::lock_guard lock(mutex_);
          seen_.push_back(request);
          return answers_[std::min(seen_.size(), answers_.size()) - 1];
        }) {}

  std::vector<ServedRequest> seen() {
    const std::lock_guard lock(mutex_);
    return seen_;
  }
  Client client() { return {quick_config(server_.url()), "bucket"}; }
  LocalServer& server() { return server_; }

 private:
  std::mutex mutex_;
  std::vector<ServedAnswer> answers_;
  std::vector<ServedRequest> seen_;
  LocalServer server_;
};

const ServedAnswer kStored = {.headers = {{"etag", "\"e\""}}};

std::optional<std::string> put_abc(Client& client, const Condition& condition = {},
                                   std::optional<uint32_t> crc32 = {}) {
  return client.put("k", {as_bytes("a"), {}, as_bytes("bc")}, condition, crc32, soon()).wait();
}

TEST(Attempts, WhatPassesIsTriedAgain) {
  ServedAnswer timeout = refusal(400, "RequestTimeout");
  timeout.headers["x-amz-bucket-region"] = "us-east-1";  // where it was sent to
  Script script({refusal(503, "SlowDown"),
                 refusal(500, "InternalError"),
                 refusal(502, ""),
                 refusal(429, "TooManyRequests"),
                 refusal(409, "OperationAborted"),
                 refusal(408, ""),
                 refusal(400, "ThrottlingException"),
                 refusal(403, "RequestLimitExceeded"),
                 timeout,
                 {.cut_after = 0},
                 {.headers = {{"content-length", "100"}}, .cut_after = 60},
                 kStored});
  Client client = script.client();
  EXPECT_EQ(put_abc(client), "\"e\"");
  EXPECT_EQ(script.seen().size(), 12u);
  for (const ServedRequest& request : script.seen()) {
    EXPECT_EQ(request.body, "abc");
    EXPECT_EQ(request.target, "/bucket/k");
  }
}

TEST(Attempts, RefusalSaysWhatIsMissingAndNoSecret) {
  Script script({refusal(403, "AccessDenied")});
  Client client = script.client();
  const Error error = error_of([&] { put_abc(client); });
  EXPECT_THAT(error, IsError(ErrorCode::kIo, "", "PutObject", "s3://bucket/k", "403 AccessDenied",
                             "as the test wants", "REQ1"));
  EXPECT_EQ(error.sys_errno(), EACCES);
  EXPECT_THAT(error.hint(), HasSubstr("s3:PutObject on arn:aws:s3:::bucket/k"));
  EXPECT_THAT(error.what(), Not(HasSubstr("CANARY")));
  EXPECT_EQ(script.seen().size(), 1u);
}

TEST(Attempts, WhatTheStoreCannotDoIsNotTriedAgain) {
  Script script({refusal(501, "NotImplemented")});
  Client client = script.client();
  EXPECT_EQ(error_of([&] { put_abc(client, Condition::absent()); }).code(),
            ErrorCode::kUnsupported);
  EXPECT_EQ(script.seen().size(), 1u);
}

TEST(Attempts, MissingObjectIsAResultAndMissingBucketAnError) {
  Script script({refusal(404, "NoSuchKey"), refusal(404, "NoSuchBucket")});
  Client client = script.client();
  EXPECT_FALSE(client.get_beginning("k", soon()).wait());
  EXPECT_THAT(error_of([&] { client.get_beginning("k", soon()).wait(); }),
              IsError(ErrorCode::kNotFound, "", "NoSuchBucket"));
}

TEST(Attempts, A404WithoutACodeIsAGateways) {
  const ServedAnswer gateway = {.status = 404, .body = "default backend - 404"};
  Script back({gateway, {.body = "x"}});
  Client client = back.client();
  EXPECT_EQ(as_text(client.get_beginning("k", soon()).wait()->bytes), "x");
  Script lasting({gateway});
  Client other = lasting.client();
  EXPECT_THAT(error_of([&] { other.get_beginning("k", soon()).wait(); }),
              IsError(ErrorCode::kIo, "", "404"));
  EXPECT_EQ(lasting.seen().size(), 3u);
  // The answer to HEAD does not show it.
  EXPECT_EQ(error_of([&] { other.head("k", false, soon()).wait(); }).code(), ErrorCode::kIo);
  Script none({refusal(404, "NoSuchKey")});
  EXPECT_FALSE(none.client().head("k", false, soon()).wait());
}

TEST(Attempts, AnswersThatWereCutAreNone) {
  const ServedAnswer cut = {.cut_after = 20, .ends_quietly = true};
  const ServedAnswer no_length = {
      .headers = {{"content-length", ""}}, .body = "abc", .cut_after = 45, .ends_quietly = true};
  Script script({cut, kStored, cut, {.body = "x"}, cut, {.body = "123"}, no_length, {.body = "x"}});
  Client client = script.client();
  EXPECT_EQ(put_abc(client), "\"e\"");
  EXPECT_EQ(as_text(client.get_beginning("k", soon()).wait()->bytes), "x");
  EXPECT_EQ(client.head("k", false, soon()).wait()->size, 3u);
  EXPECT_EQ(as_text(client.get_beginning("k", soon()).wait()->bytes), "x");
  EXPECT_EQ(script.seen().size(), 8u);
}

TEST(Attempts, WithoutAnEtagThereIsNoConditionOnOne) {
  Script script({{.headers = {{"etag", ""}}}});
  Client client = script.client();
  EXPECT_THAT(error_of([&] { put_abc(client); }), IsError(ErrorCode::kIo, "", "no ETag"));
  EXPECT_EQ(script.seen().size(), 3u);
  EXPECT_EQ(error_of([&] { put_abc(client, Condition::has("")); }).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { client.remove_if("k", "", soon()); }).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(script.seen().size(), 3u);
}

TEST(Attempts, ExpiredCredentialsAreFoundAgainOnce) {
  const std::string file = testing::TempDir() + "s3_attempts_" + std::to_string(::getpid());
  const auto write = [&](const std::string& id) {
    std::ofstream(file) << "[default]\naws_access_key_id=" << id << "\naws_secret_access_key=s\n";
  };
  write("OLD");
  LocalServer server([&](const ServedRequest& request) {
    if (request.headers.at("authorization").find("NEW/") != std::string::npos) return kStored;
    write("NEW");
    return refusal(400, "ExpiredToken");
  });
  Config config = quick_config(server.url());
  config.environment = {{"AWS_SHARED_CREDENTIALS_FILE", file}};
  Client client(config, "bucket");
  EXPECT_EQ(put_abc(client), "\"e\"");
  std::filesystem::remove(file);

  Script expired({refusal(400, "ExpiredToken")});
  Client fixed = expired.client();  // from variables, which stay
  EXPECT_THAT(error_of([&] { put_abc(fixed); }), IsError(ErrorCode::kIo, "", "400 ExpiredToken"));
  EXPECT_EQ(expired.seen().size(), 2u);
}

// Many requests wait for one search, each until its deadline.
TEST(Attempts, EndpointOfCredentialsThatHangsHoldsUpNothingElse) {
  std::atomic<int> calls = 0;
  LocalServer endpoint([&](const ServedRequest&) {
    ++calls;
    return ServedAnswer{.delay = milliseconds(60'000)};
  });
  Script script({kStored});
  Config config = quick_config(script.server().url());
  config.environment = {{"AWS_CONTAINER_CREDENTIALS_FULL_URI", endpoint.url() + "/"}};
  Client client(config, "bucket");
  std::vector<Pending<std::optional<Beginning>>> pending;
  for (int i = 0; i < 30; ++i) {
    pending.push_back(client.get_beginning("k", Deadline::after(milliseconds(50))));
  }
  for (auto& each : pending) {
    EXPECT_THAT(error_of([&] { each.wait(); }), IsError(ErrorCode::kTimeout, "", "credentials"));
  }
  EXPECT_LE(calls, 1);
  EXPECT_TRUE(script.seen().empty());
}

TEST(Attempts, WrongClockIsCorrectedFromTheAnswer) {
  ServedAnswer skewed = refusal(403, "RequestTimeTooSkewed");
  skewed.headers["date"] = "Fri, 24 May 2013 00:00:00 GMT";
  Script script({skewed, kStored});
  Client client = script.client();
  EXPECT_EQ(put_abc(client), "\"e\"");
  EXPECT_THAT(script.seen()[1].headers["x-amz-date"], HasSubstr("20130524T0000"));
  put_abc(client);
  EXPECT_THAT(script.seen()[2].headers["x-amz-date"], HasSubstr("20130524T0000"));
  Script again({skewed});
  Client refused = again.client();
  EXPECT_EQ(error_of([&] { put_abc(refused); }).code(), ErrorCode::kIo);
  EXPECT_EQ(again.seen().size(), 2u);
}

TEST(Attempts, RegionComesFromTheAnswer) {
  ServedAnswer moved = refusal(301, "PermanentRedirect");
  moved.headers["x-amz-bucket-region"] = "eu-north-1";
  Script script({moved, kStored, kStored,
                 refusal(400, "AuthorizationHeaderMalformed", "<Region>ap-east-1</Region>"),
                 kStored});
  Client client = script.client();
  for (int i = 0; i < 3; ++i) put_abc(client);
  std::vector<std::string> regions;
  for (const ServedRequest& request : script.seen()) {
    const std::string& line = request.headers.at("authorization");
    const size_t day = line.find("/20");
    regions.push_back(line.substr(day + 10, line.find("/s3/") - day - 10));
  }
  EXPECT_THAT(regions,
              ElementsAre("us-east-1", "eu-north-1", "eu-north-1", "eu-north-1", "ap-east-1"));
}

TEST(Attempts, DeadlineNamesTheLastProblem) {
  Script script({refusal(503, "SlowDown")});
  Client client = script.client();
  const Error error =
      error_of([&] { client.head("k", false, Deadline::after(milliseconds(300))).wait(); });
  EXPECT_THAT(error,
              IsError(ErrorCode::kTimeout, "", "HeadObject", "s3://bucket/k", "attempts", "503"));
  EXPECT_GT(script.seen().size(), 2u);
}

TEST(Attempts, ServerThatHangsEndsAtTheDeadline) {
  Script script({{.delay = milliseconds(60'000)}});
  Client client = script.client();
  Bytes bytes(10);
  const Error error =
      error_of([&] { client.get("k", 0, bytes, "", Deadline::after(milliseconds(200))).wait(); });
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  EXPECT_THAT(error.message(), testing::EndsWith("after 1 attempts"));
}

TEST(Attempts, InterruptEndsThemWithItsReason) {
  Script script({{.delay = milliseconds(60'000)}});
  Client client = script.client();
  const auto interrupt = std::make_shared<Interrupt>();
  Pending<std::optional<Beginning>> pending =
      client.get_beginning("k", Deadline::never().with_interrupt(interrupt));
  interrupt->request(std::make_exception_ptr(std::runtime_error("Ctrl-C")));
  EXPECT_THROW(pending.wait(), std::runtime_error);
}

TEST(Attempts, PendingThatIsDroppedEndsItsRequest) {
  Script script({{.delay = milliseconds(60'000)}, kStored});
  Client client = script.client();
  {
    Bytes bytes(10);
    const auto dropped = client.get("k", 0, bytes, "", Deadline::never());
    while (script.seen().empty()) std::this_thread::yield();
  }
  EXPECT_EQ(put_abc(client), "\"e\"");
}

TEST(Attempts, EndpointThatHasNeverAnsweredIsGivenUp) {
  std::string url;
  {
    LocalServer gone([](const ServedRequest&) { return ServedAnswer(); });
    url = gone.url();
  }
  Config config = quick_config(url);
  config.first_contact = milliseconds(20);
  Client client(config, "bucket");
  const Error error = error_of([&] { client.get_beginning("k", Deadline::never()).wait(); });
  EXPECT_THAT(error, IsError(ErrorCode::kIo, "", url + " has not answered"));
}

// So a command that looks at many objects does not wait for each.
TEST(Attempts, EndpointThatWasGivenUpIsNotAskedByTheNextRequests) {
  std::atomic<int> asked = 0;
  LocalServer server([&](const ServedRequest&) {
    ++asked;
    return ServedAnswer{.cut_after = 0};
  });
  Config config = quick_config(server.url());
  config.first_contact = milliseconds(500);
  Client client(config, "bucket");
  const auto look = [&] { client.get_beginning("k", Deadline::never()).wait(); };
  EXPECT_THAT(error_of(look), IsError(ErrorCode::kIo, "", "has not answered"));
  const int before = asked;
  EXPECT_GT(before, 1);
  for (int i = 0; i < 5; ++i) {
    EXPECT_THAT(error_of(look), IsError(ErrorCode::kIo, "", "has not answered"));
  }
  EXPECT_EQ(asked, before);
}

// Its packets get no answer, as behind a firewall.
TEST(Attempts, EndpointThatDoesNotConnectIsGivenUp) {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ::bind(listener, any, size);
  ::listen(listener, 0);
  ::getsockname(listener, any, &size);
  const int first = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ::connect(first, any, size);  // fills the queue, from which nobody takes it
  Config config = quick_config("http://127.0.0.1:" + std::to_string(ntohs(address.sin_port)));
  config.connect = config.first_contact = milliseconds(50);
  const Error error =
      error_of([&] { Client(config, "bucket").get_beginning("k", Deadline::never()).wait(); });
  EXPECT_THAT(error, IsError(ErrorCode::kIo, "", "127.0.0.1"));
  ::close(first);
  ::close(listener);
}

TEST(Attempts, ManyAreInProgressOnFewConnections) {
  constexpr int kInProgress = 8;
  std::atomic<int> now = 0, most = 0;
  LocalServer server([&](const ServedRequest& request) {
    const int count = ++now;
    int before = most;
    while (before < count && !most.compare_exchange_weak(before, count)) {
    }
    // The first ones wait for one another.
    for (int i = 0; i < 5000 && most < kInProgress; ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    --now;
    return ServedAnswer{.body = request.target};
  });
  Config config = quick_config(server.url());
  config.in_progress = kInProgress;
  Client client(config, "bucket");
  std::vector<Pending<std::optional<Beginning>>> pending;
  for (int i = 0; i < 300; ++i) pending.push_back(client.get_beginning(std::to_string(i), soon()));
  for (int i = 0; i < 300; ++i) {
    EXPECT_EQ(as_text(pending[i].wait()->bytes), "/bucket/" + std::to_string(i));
  }
  EXPECT_EQ(most, kInProgress);
  EXPECT_EQ(server.connections(), kInProgress);
}

TEST(Attempts, RangesMustBeWhatWasAskedFor) {
  const auto range = [](const char* header, const char* body) {
    return ServedAnswer{.status = 206, .headers = {{"content-range", header}}, .body = body};
  };
  Script cut({range("bytes 2-5/9", "ab"), range("bytes 2-5/9", "abcd")});
  Client client = cut.client();
  Bytes bytes(4);
  client.get("k", 2, bytes, "", soon()).wait();
  EXPECT_EQ(as_text(bytes), "abcd");
  EXPECT_EQ(cut.seen()[0].headers["range"], "bytes=2-5");
  Script shorter({range("bytes 2-3/4", "ab")});
  Client other = shorter.client();
  EXPECT_THAT(error_of([&] { other.get("k", 2, bytes, "", soon()).wait(); }),
              IsError(ErrorCode::kIo, "", "4 bytes were expected", "2 found"));
  Script whole({{.body = "0123456789"}});
  Client ignoring = whole.client();
  EXPECT_THAT(error_of([&] { ignoring.get("k", 2, bytes, "", soon()).wait(); }),
              IsError(ErrorCode::kIo, "", "longer than what was asked for"));
  Script others({range("bytes 0-3/9", "abcd"), {.body = "abcd"}});
  Client wrong = others.client();
  EXPECT_THAT(error_of([&] { wrong.get("k", 2, bytes, "", soon()).wait(); }),
              IsError(ErrorCode::kIo, "", "bytes=2-5 was asked for"));
  wrong.get("k", 0, bytes, "", soon()).wait();
  EXPECT_THAT(error_of([&] { ignoring.get("k", 2, {}, "", soon()).wait(); }),
              IsError(ErrorCode::kInvalidArgument, ""));
}

TEST(Attempts, DamageOnTheWayIsTriedAgainAFewTimes) {
  Script script({refusal(400, "BadDigest"), kStored});
  Client client = script.client();
  EXPECT_EQ(put_abc(client, {}, 0xcbf43926), "\"e\"");
  EXPECT_EQ(script.seen()[0].headers["x-amz-checksum-crc32"], "y/Q5Jg==");
  Script damaged({refusal(400, "BadDigest")});
  Client other = damaged.client();
  EXPECT_THAT(error_of([&] { put_abc(other); }), IsError(ErrorCode::kIo, "", "BadDigest"));
  EXPECT_EQ(damaged.seen().size(), 3u);
}

// An attempt may have been executed without an answer, so what is stored decides.
TEST(Attempts, BrokenConditionIsResolvedByTheBytes) {
  const auto bytes = [](const char* body, const char* range = "bytes 0-2/3") {
    return ServedAnswer{
        .status = 206, .headers = {{"content-range", range}, {"etag", "\"mine\""}}, .body = body};
  };
  const ServedAnswer broken = refusal(412, "PreconditionFailed");
  const auto put = [](Script& script, const Condition& condition) {
    Client client = script.client();
    return put_abc(client, condition);
  };
  Script mine({{.cut_after = 0}, broken, bytes("abc")});
  EXPECT_EQ(put(mine, Condition::absent()), "\"mine\"");
  EXPECT_EQ(mine.seen()[1].headers["if-none-match"], "*");
  Script by_gateway({broken, bytes("abc")});
  EXPECT_EQ(put(by_gateway, Condition::absent()), "\"mine\"");
  for (const ServedAnswer& other : {bytes("xyz"),
                                    bytes("abc", "bytes 0-2/5"),
                                    bytes("ab", "bytes 0-1/2"),
                                    {.body = "ab"},
                                    refusal(404, "NoSuchKey"),
                                    refusal(416, "InvalidRange")}) {
    Script script({broken, other});
    EXPECT_EQ(put(script, Condition::has("\"e\"")), std::nullopt) << other.body;
    EXPECT_EQ(script.seen()[0].headers["if-match"], "\"e\"");
  }
}

TEST(Attempts, AProbeOfConditionsDoesNotLookAtTheBytes) {
  Script script({refusal(412, "PreconditionFailed"), kStored});
  Client client = script.client();
  EXPECT_TRUE(client.refuses("k", {as_bytes("abc")}, Condition::absent(), soon()).wait());
  EXPECT_FALSE(client.refuses("k", {as_bytes("abc")}, Condition::absent(), soon()).wait());
  EXPECT_EQ(script.seen().size(), 2u);
}

TEST(Attempts, CompletionIsReadToItsEndAndALostOneResolvedByTheObject) {
  std::vector<Part> parts = {{1, "\"d41d8cd98f00b204e9800998ecf8427e\"", 0xcbf43926u, 9}};
  const auto head = [](const char* crc32, const char* etag = "\"whole-1\"") {
    return ServedAnswer{
        .headers = {{"etag", etag}, {"content-length", "9"}, {"x-amz-checksum-crc32", crc32}}};
  };
  const auto complete = [&](Script& script) {
    Client client = script.client();
    return client.complete("k", "u", parts, Condition::absent(), soon()).wait();
  };
  const ServedAnswer gone = refusal(404, "NoSuchUpload"), inside = refusal(200, "InternalError");
  Script whole({inside, gone, head("y/Q5Jg==")});
  EXPECT_EQ(complete(whole), "\"whole-1\"");
  const ServedAnswer half = {.body = "<CompleteMultipartUploadResult><ETag>"};
  const char* const of_parts = "\"59adb24ef3cdbe0297f05b395827453f-1\"";
  Script cut({half, gone, head("", of_parts)});
  EXPECT_EQ(complete(cut), of_parts);
  Script same_size({half, gone, head("")});
  EXPECT_EQ(error_of([&] { complete(same_size); }).code(), ErrorCode::kNotFound);
  Script none({refusal(200, "NoSuchKey"), refusal(404, "NoSuchKey")});
  EXPECT_EQ(complete(none), std::nullopt);
  Script others({inside, gone, head("AAAAAA==")});
  EXPECT_THAT(error_of([&] { complete(others); }),
              IsError(ErrorCode::kNotFound, "", "NoSuchUpload"));
  Script at_once({gone});
  EXPECT_EQ(error_of([&] { complete(at_once); }).code(), ErrorCode::kNotFound);
  Script broken({refusal(200, "PreconditionFailed")});
  EXPECT_EQ(complete(broken), std::nullopt);
  Script refused({refusal(200, "InvalidPart")});
  EXPECT_THAT(error_of([&] { complete(refused); }), IsError(ErrorCode::kIo, "", "InvalidPart"));
}

// libcurl repeats a request without a body, if the connection is one that was used before.
TEST(Attempts, AnUploadIsNotBegunTwiceUnnoticed) {
  const auto upload = [](const char* id) {
    return fmt::format("<Upload><Key>k</Key><UploadId>{}</UploadId></Upload>", id);
  };
  const ServedAnswer begun = {
      .body =
          "<InitiateMultipartUploadResult><UploadId>2</UploadId></InitiateMultipartUploadResult>"};
  const ServedAnswer both = {.body =
                                 "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>" +
                                 upload("1") + upload("2") + "</ListMultipartUploadsResult>"};
  Script script({kStored, {.cut_after = 0}, begun, both, {.status = 204}});
  Client client = script.client();
  put_abc(client);
  EXPECT_EQ(client.begin_upload("k", true, soon()).wait(), "2");
  ASSERT_EQ(script.seen().size(), 5u);
  EXPECT_TRUE(script.seen().back().has("uploadId=1"));
}

TEST(Attempts, RemovalAfterALostAnswerIsDone) {
  const ServedAnswer other = {.headers = {{"etag", "\"f\""}}};
  const auto remove = [](Script& script) {
    return script.client().remove_if("k", "\"e\"", soon()).wait();
  };
  Script lost({kStored, {.cut_after = 0}, refusal(412, ""), refusal(404, "NoSuchKey")});
  EXPECT_TRUE(remove(lost));
  Script changed({kStored, refusal(412, ""), other});
  EXPECT_FALSE(remove(changed));
  Script another({other});  // of a store that ignores the condition
  EXPECT_FALSE(remove(another));
  EXPECT_EQ(another.seen().size(), 1u);
}

TEST(Attempts, RemovalOfManyGoesOnWhileKeysAreRefusedForNow) {
  const auto answer = [](const char* code) {
    return ServedAnswer{.body = std::string("<DeleteResult><Error><Key>a</Key><Code>") + code +
                                "</Code></Error></DeleteResult>"};
  };
  Script script({answer("SlowDown"), answer("InternalError"), answer("AccessDenied")});
  Client client = script.client();
  const auto refused = client.remove({"a", "b"}, soon()).wait();
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].code, "AccessDenied");
  EXPECT_EQ(script.seen().size(), 3u);
  EXPECT_EQ(error_of([&] { client.remove({"a\rb"}, soon()); }).code(), ErrorCode::kInvalidArgument);
}

TEST(Attempts, HeadersOfTheVariableGoWithTheirRequests) {
  Script script({kStored});
  Config config =
      config_from({{"AWS_ACCESS_KEY_ID", "i"},
                   {"AWS_SECRET_ACCESS_KEY", "s"},
                   {"AWS_ENDPOINT_URL", script.server().url()},
                   {kHeadersVariable, "x-amz-request-payer: requester; x-amz-acl: private"}});
  Client client(config, "bucket");
  put_abc(client);
  client.get_beginning("k", soon()).wait();
  EXPECT_EQ(script.seen()[0].headers["x-amz-acl"], "private");
  EXPECT_THAT(script.seen()[0].headers["authorization"], HasSubstr(";x-amz-acl;"));
  EXPECT_EQ(script.seen()[0].headers["x-amz-request-payer"], "requester");
  EXPECT_EQ(script.seen()[1].headers.count("x-amz-acl"), 0u);
  EXPECT_EQ(script.seen()[1].headers["x-amz-request-payer"], "requester");
}

TEST(Attempts, KeysAreSentLiterally) {
  Script script({{.body = "x"}});
  Client client = script.client();
  for (const char* const key : {"a//b", "/a", "a/../b", "./a", "a b+c%41"})
    client.get_beginning(key, soon()).wait();
  std::vector<std::string> targets;
  for (const ServedRequest& request : script.seen()) targets.push_back(request.target);
  EXPECT_THAT(targets, ElementsAre("/bucket/a//b", "/bucket//a", "/bucket/a/../b", "/bucket/./a",
                                   "/bucket/a%20b%2Bc%2541"));
}

TEST(Attempts, BucketInTheHostNameUnlessItCannotBe) {
  Script script({{.body = "x"}});
  Config config = quick_config(script.server().url());
  config.endpoint.replace(config.endpoint.find("127.0.0.1"), 9, "localhost");
  config.path_style = false;
  Client(config, "my-bucket").get_beginning("k", soon()).wait();
  Client(config, "my.bucket").get_beginning("k", soon()).wait();
  EXPECT_THAT(script.seen()[0].headers["host"], HasSubstr("my-bucket.localhost:"));
  EXPECT_EQ(script.seen()[0].target, "/k");
  EXPECT_EQ(script.seen()[1].target, "/my.bucket/k");
}

// Of the environment that the client was given. libcurl would read the process's own.
TEST(Attempts, ProxiesOfTheEnvironmentAreUsed) {
  Script proxy({kStored}), store({kStored});
  ::setenv("http_proxy", "http://127.0.0.1:1", 1);
  Config config = quick_config("http://store.invalid");
  config.environment["http_proxy"] = proxy.server().url();
  Client client(config, "bucket");
  EXPECT_EQ(put_abc(client), "\"e\"");
  EXPECT_EQ(proxy.seen()[0].target, "http://store.invalid/bucket/k");
  EXPECT_EQ(proxy.seen()[0].headers["host"], "store.invalid");
  Client without = store.client();
  EXPECT_EQ(put_abc(without), "\"e\"");
  ::unsetenv("http_proxy");
}

TEST(Attempts, ProxysPasswordIsNotShown) {
  Config config = quick_config("http://store.invalid");
  config.environment["http_proxy"] = "foo://u:CANARY@h:1";
  config.first_contact = milliseconds(1);
  const Error error = error_of([&] { Client(config, "bucket").get_beginning("k", soon()).wait(); });
  EXPECT_THAT(error, IsError(ErrorCode::kIo, "", "Unsupported proxy scheme"));
  EXPECT_THAT(error.what(), Not(HasSubstr("CANARY")));
}

}  // namespace attempts_test
}  // namespace tilestone::s3
