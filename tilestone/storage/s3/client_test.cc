// The client and real servers. What differs between them stands in `Abilities`.
#include "tilestone/storage/s3/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <thread>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error_testing.h"
#include "tilestone/storage/s3/real_server_testing.h"

namespace tilestone::s3 {
namespace client_test {

using testing::ElementsAre;
using testing::Field;
using testing::UnorderedElementsAre;

struct Abilities {
  const char* name;
  RealServer& (*server)();
  bool put_conditions;                    // If-None-Match and If-Match on PUT
  bool complete_conditions;               // If-None-Match on CompleteMultipartUpload
  bool checks_crc32;                      // x-amz-checksum-crc32 of a PUT and of a part
  bool lasting_etag;                      // that of a completion is the object's
  std::vector<std::string> literal_keys;  // of those that a file system would normalise
};

const Abilities kSeaweed = {"seaweed", seaweed, true, true, true, true, {"a//b", "/h"}};
// It answers conditions as if they held.
const Abilities kRclone = {"rclone", rclone, false, false, false, false, {}};

Deadline in_time() { return Deadline::after(std::chrono::seconds(20)); }

Bytes pattern(size_t size, uint32_t seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>((i * 31 + i / 251 + seed) & 255);
  return bytes;
}

class S3Server : public testing::TestWithParam<Abilities> {
 protected:
  S3Server() {
    static int count = 0;
    bucket_ = "bucket-" + std::to_string(count++);
    client_ = std::make_unique<Client>(GetParam().server().config(), bucket_);
    GetParam().server().create_bucket(bucket_);
  }

  std::optional<std::string> put(const std::string& key, ByteView bytes, Condition condition = {}) {
    return client_->put(key, {bytes}, condition, crc32(bytes), in_time()).wait();
  }
  std::optional<std::string> put(const std::string& key, std::string_view text,
                                 Condition condition = {}) {
    return put(key, as_bytes(text), condition);
  }
  std::string text(const std::string& key) {
    const auto found = client_->get_beginning(key, in_time()).wait();
    return found ? std::string(as_text(found->bytes)) : "(none)";
  }
  std::vector<std::string> keys(const ListRequest& request = {}) {
    std::vector<std::string> out;
    ListRequest next = request;
    do {
      const ListPage page = client_->list(next, in_time()).wait();
      for (const Listed& each : page.objects) out.push_back(each.key);
      next.next = page.next;
    } while (!next.next.empty());
    return out;
  }
  std::vector<Part> upload(const std::string& key, const std::string& id,
                           const std::vector<ByteView>& bodies) {
    std::vector<Pending<std::string>> pending;
    std::vector<Part> parts;
    for (const ByteView body : bodies) {
      const int number = static_cast<int>(parts.size()) + 1;
      parts.push_back({number, "", crc32(body), body.size()});
      pending.push_back(client_->upload_part(key, id, number, {body}, crc32(body), in_time()));
    }
    for (size_t i = 0; i < parts.size(); ++i) parts[i].etag = pending[i].wait();
    return parts;
  }

  std::string bucket_;
  std::unique_ptr<Client> client_;
};

TEST_P(S3Server, PutHeadGetAndRanges) {
  const Bytes bytes = pattern(100'000, 1);
  const auto etag = client_
                        ->put("a/b", {ByteView(bytes).first(7), {}, ByteView(bytes).subspan(7)}, {},
                              crc32(bytes), in_time())
                        .wait();
  ASSERT_TRUE(etag);
  const auto info = client_->head("a/b", true, in_time()).wait();
  ASSERT_TRUE(info);
  EXPECT_EQ(info->size, bytes.size());
  EXPECT_EQ(info->etag, *etag);
  Bytes part(1000);
  EXPECT_EQ(client_->get("a/b", 5000, part, *etag, in_time()).wait(), *etag);
  EXPECT_TRUE(std::ranges::equal(part, ByteView(bytes).subspan(5000, 1000)));
  Bytes whole(bytes.size());
  client_->get("a/b", 0, whole, "", in_time()).wait();
  EXPECT_EQ(whole, bytes);
  EXPECT_FALSE(client_->head("a", false, in_time()).wait());
  EXPECT_EQ(text("none"), "(none)");
  EXPECT_EQ(error_of([&] { client_->get("none", 0, part, "", in_time()).wait(); }).code(),
            ErrorCode::kNotFound);
  EXPECT_EQ(error_of([&] { client_->get("a/b", 99'999, part, "", in_time()).wait(); }).code(),
            ErrorCode::kIo);
}

TEST_P(S3Server, EmptyObjects) {
  EXPECT_TRUE(put("empty", ""));
  EXPECT_EQ(client_->head("empty", false, in_time()).wait()->size, 0u);
  EXPECT_EQ(text("empty"), "");
}

TEST_P(S3Server, WrongKeysAreRefusedWithoutSecrets) {
  Config config = GetParam().server().config();
  config.environment["AWS_SECRET_ACCESS_KEY"] = "CANARY";
  Client client(config, bucket_);
  const Error error = error_of([&] { client.get_beginning("k", in_time()).wait(); });
  EXPECT_THAT(error, IsError(ErrorCode::kIo, "", bucket_, "403", "SignatureDoesNotMatch"));
  EXPECT_THAT(error.what(), testing::Not(testing::HasSubstr("CANARY")));
}

TEST_P(S3Server, OddKeysAreStoredAndListedAsTheyAre) {
  std::vector<std::string> odd = {"a b",  "a+b",     "a%20b",  "a=b&c",      "\xc3\xa9\xe2\x82\xac",
                                  "a'b",  "a\"b",    "a<b>&c", "a:b@c",      "a*b(c)!",
                                  "~a,b", "a;b?c#d", " a",     "a^b`c{d}|e", "[a]$b"};
  for (const std::string& key : odd) EXPECT_TRUE(put(key, key)) << key;
  for (const std::string& key : odd) EXPECT_EQ(text(key), key);
  std::vector<std::string> found = keys();
  std::ranges::sort(odd);
  std::ranges::sort(found);
  EXPECT_EQ(found, odd);
  EXPECT_TRUE(client_->remove(odd, in_time()).wait().empty());
  EXPECT_TRUE(keys().empty());
}

TEST_P(S3Server, ListsByPrefixDelimiterAndPage) {
  for (const char* const key : {"run1/a", "run1/b", "run1/c/d", "run10/a"}) put(key, key);
  EXPECT_THAT(keys({.prefix = "run1/"}), ElementsAre("run1/a", "run1/b", "run1/c/d"));
  EXPECT_THAT(keys({.prefix = "run1/", .page = 1}), ElementsAre("run1/a", "run1/b", "run1/c/d"));
  const ListPage page = client_->list({.prefix = "run1/", .delimiter = "/"}, in_time()).wait();
  EXPECT_THAT(page.objects,
              ElementsAre(Field(&Listed::key, "run1/a"), Field(&Listed::key, "run1/b")));
  EXPECT_THAT(page.prefixes, ElementsAre("run1/c/"));
  EXPECT_EQ(page.objects[0].size, 6u);
  EXPECT_EQ(page.objects[0].etag, client_->head("run1/a", false, in_time()).wait()->etag);
  EXPECT_TRUE(keys({.prefix = "none/"}).empty());
}

TEST_P(S3Server, ConditionsOfPut) {
  const auto first = put("k", "one", Condition::absent());
  ASSERT_TRUE(first);
  EXPECT_EQ(!put("k", "two", Condition::absent()), GetParam().put_conditions);
  if (!GetParam().put_conditions) return;
  EXPECT_EQ(text("k"), "one");
  const auto second = put("k", "two", Condition::has(*first));
  ASSERT_TRUE(second);
  EXPECT_FALSE(put("k", "three", Condition::has(*first)));
  EXPECT_EQ(text("k"), "two");
  EXPECT_FALSE(put("none", "x", Condition::has(*first)));
  EXPECT_EQ(text("none"), "(none)");
}

TEST_P(S3Server, OneOfManyPutsIfAbsentWins) {
  std::vector<std::string> texts;
  for (int i = 0; i < 3; ++i) texts.push_back("writer " + std::to_string(i));
  std::vector<Pending<std::optional<std::string>>> pending;
  for (const std::string& each : texts) {
    pending.push_back(client_->put("k", {as_bytes(each)}, Condition::absent(), {}, in_time()));
  }
  std::vector<std::string> winners;
  for (size_t i = 0; i < pending.size(); ++i) {
    if (pending[i].wait()) winners.push_back(texts[i]);
  }
  EXPECT_THAT(winners, testing::Contains(text("k")));
  EXPECT_EQ(winners.size(), GetParam().put_conditions ? 1u : texts.size());
}

TEST_P(S3Server, GetIfItHasTheEtag) {
  const auto first = put("k", "one");
  const auto second = put("k", "two");
  Bytes bytes(3);
  client_->get("k", 0, bytes, *second, in_time()).wait();
  EXPECT_EQ(error_of([&] { client_->get("k", 0, bytes, *first, in_time()).wait(); }).code(),
            ErrorCode::kMismatch);
}

TEST_P(S3Server, RemovesIfItHasTheEtag) {
  const auto first = put("k", "one");
  const auto second = put("k", "two");
  EXPECT_FALSE(client_->remove_if("k", *first, in_time()).wait());
  EXPECT_EQ(text("k"), "two");
  EXPECT_TRUE(client_->remove_if("k", *second, in_time()).wait());
  EXPECT_EQ(text("k"), "(none)");
}

TEST_P(S3Server, RemovesManyOfWhichSomeAreAbsent) {
  std::vector<std::string> names;
  std::vector<Pending<std::optional<std::string>>> pending;
  for (int i = 0; i < 100; ++i) {
    names.push_back("many/" + std::to_string(i));
    pending.push_back(client_->put(names.back(), {as_bytes("x")}, {}, {}, in_time()));
  }
  for (auto& each : pending) each.wait();
  put("other", "x");
  while (names.size() < kMaxKeysToRemove) names.push_back("absent/" + std::to_string(names.size()));
  EXPECT_TRUE(client_->remove(names, in_time()).wait().empty());
  EXPECT_THAT(keys(), ElementsAre("other"));
  names.push_back("one too many");
  EXPECT_EQ(error_of([&] { client_->remove(names, in_time()); }).code(),
            ErrorCode::kInvalidArgument);
}

// Whether the call throws the error of a store that has compared a checksum.
template <typename Call>
bool is_refused(const Call& call) {
  try {
    call();
    return false;
  } catch (const Error& error) {
    EXPECT_THAT(error, IsError(ErrorCode::kIo, "", "400"));
    return true;
  }
}

TEST_P(S3Server, WrongChecksumsAreRefused) {
  EXPECT_EQ(is_refused([&] { client_->put("k", {as_bytes("abc")}, {}, 1, in_time()).wait(); }),
            GetParam().checks_crc32);
  const std::string id = client_->begin_upload("m", true, in_time()).wait();
  EXPECT_EQ(
      is_refused([&] { client_->upload_part("m", id, 1, {as_bytes("abc")}, 1, in_time()).wait(); }),
      GetParam().checks_crc32);
  client_->abort("m", id, in_time()).wait();
}

TEST_P(S3Server, MultipartUpload) {
  const Bytes bytes = pattern((10 << 20) + 12'345, 3);
  const ByteView all = bytes;
  const size_t part = 5 << 20;
  const std::string id = client_->begin_upload("m", true, in_time()).wait();
  EXPECT_EQ(text("m"), "(none)");
  const auto parts =
      upload("m", id, {all.first(part), all.subspan(part, part), all.subspan(2 * part)});
  const auto etag = client_->complete("m", id, parts, {}, in_time()).wait();
  ASSERT_TRUE(etag);
  const auto info = client_->head("m", true, in_time()).wait();
  EXPECT_EQ(info->size, bytes.size());
  EXPECT_EQ(info->etag == *etag, GetParam().lasting_etag);
  Bytes found(bytes.size());
  client_->get("m", 0, found, info->etag, in_time()).wait();
  EXPECT_TRUE(found == bytes);
}

TEST_P(S3Server, UnfinishedUploadsAreListedAndAborted) {
  const std::string id = client_->begin_upload("a/m", true, in_time()).wait();
  const std::string other = client_->begin_upload("b/m", false, in_time()).wait();
  upload("a/m", id, {as_bytes("abc")});
  const auto ids = [&](const std::string& prefix) {
    std::set<std::string> out;
    std::optional<Upload> after;
    do {
      const UploadPage page = client_->uploads(prefix, after, in_time()).wait();
      for (const Upload& each : page.uploads) out.insert(each.key + " " + each.id);
      after = page.next;
    } while (after);
    return out;
  };
  EXPECT_THAT(ids("a/"), ElementsAre("a/m " + id));
  EXPECT_THAT(ids(""), UnorderedElementsAre("a/m " + id, "b/m " + other));
  EXPECT_TRUE(client_->abort("a/m", id, in_time()).wait());
  client_->abort("b/m", other, in_time()).wait();
  EXPECT_TRUE(ids("").empty());
  EXPECT_EQ(text("a/m"), "(none)");
}

TEST_P(S3Server, ConditionOfACompletion) {
  const std::string id = client_->begin_upload("m", true, in_time()).wait();
  const auto parts = upload("m", id, {as_bytes("abc")});
  put("m", "before");
  EXPECT_EQ(!client_->complete("m", id, parts, Condition::absent(), in_time()).wait(),
            GetParam().complete_conditions);
  EXPECT_EQ(text("m"), GetParam().complete_conditions ? "before" : "abc");
}

TEST_P(S3Server, KeysThatAFileSystemWouldNormaliseAreLiteralOrRefused) {
  std::vector<std::string> stored;
  for (const char* const key : {"a//b", "c/../d", "./e", "f/./g", "/h"}) {
    try {
      put(key, key);
      stored.push_back(key);
    } catch (const Error& error) {
      EXPECT_THAT(error, IsError(ErrorCode::kIo, "", key, "400"));
    }
  }
  for (const std::string& key : stored) EXPECT_EQ(text(key), key);
  EXPECT_EQ(stored, GetParam().literal_keys);
}

INSTANTIATE_TEST_SUITE_P(All, S3Server, testing::Values(kSeaweed, kRclone),
                         [](const auto& each) { return each.param.name; });

void PrintTo(const Abilities& abilities, std::ostream* out) { *out << abilities.name; }

TEST(S3Tls, NeedsACertificateThatIsKnown) {
  RealServer server(RealServer::Kind::kRcloneTls);
  Config config = server.config();
  config.ca_bundle = server.certificate();
  Client client(config, "bucket");
  server.create_bucket("bucket");
  EXPECT_TRUE(client.put("k", {as_bytes("x")}, {}, {}, in_time()).wait());
  Client stranger(server.config(), "bucket");
  EXPECT_THAT(error_of([&] { stranger.get_beginning("k", in_time()).wait(); }),
              IsError(ErrorCode::kIo, "", "GetObject", "certificate", "AWS_CA_BUNDLE"));
}

TEST(S3Restart, RequestsGoOnWhenTheServerIsBack) {
  RealServer server(RealServer::Kind::kRclone);
  Client client(server.config(), "bucket");
  server.create_bucket("bucket");
  client.put("k", {as_bytes("x")}, {}, {}, in_time()).wait();
  server.kill_now();
  auto pending = client.get_beginning("k", in_time());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  server.start();
  EXPECT_EQ(as_text(pending.wait()->bytes), "x");
}

}  // namespace client_test
}  // namespace tilestone::s3
