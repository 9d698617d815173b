// The client through a proxy that damages what passes, to a real server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error_testing.h"
#include "tilestone/storage/s3/client.h"
#include "tilestone/storage/s3/local_server_testing.h"
#include "tilestone/storage/s3/real_server_testing.h"

namespace tilestone::s3 {
namespace faults_test {

Deadline long_enough() { return Deadline::after(std::chrono::seconds(30)); }

Bytes random_bytes(size_t size, std::mt19937& chance) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(chance());
  return bytes;
}

std::string fresh_bucket() {
  static int count = 0;
  const std::string name = "faults-" + std::to_string(count++);
  seaweed().create_bucket(name);
  return name;
}

std::vector<Part> upload_parts(Client& client, const std::string& key, const std::string& id,
                               const std::vector<Bytes>& bodies) {
  std::vector<Pending<std::string>> pending;
  std::vector<Part> parts;
  for (const Bytes& body : bodies) {
    parts.push_back({static_cast<int>(parts.size()) + 1, "", crc32(body), body.size()});
    pending.push_back(client.upload_part(key, id, parts.back().number, {body}, parts.back().crc32,
                                         long_enough()));
  }
  for (size_t i = 0; i < parts.size(); ++i) parts[i].etag = pending[i].wait();
  return parts;
}

// Chooses a fault for one in three requests, but never twice in a row for the same method and
// target. What damages an answer that has no checksum is not among them.
class RandomFaults {
 public:
  explicit RandomFaults(uint32_t seed) : chance_(seed) {}

  Fault operator()(const ServedRequest& request) {
    const std::lock_guard lock(mutex_);
    if (last_[request.method + request.target] || chance_() % 3 != 0) {
      last_[request.method + request.target] = false;
      return Fault::kNone;
    }
    last_[request.method + request.target] = true;
    constexpr Fault kFaults[] = {Fault::kUnavailable,     Fault::kTooMany,     Fault::kConflict,
                                 Fault::kErrorAfterwards, Fault::kLostAnswer,  Fault::kCutRequest,
                                 Fault::kCutAnswer,       Fault::kOtherRegion, Fault::kDamaged};
    const Fault fault = kFaults[chance_() % std::size(kFaults)];
    // Only bodies with a checksum may be damaged.
    const bool safe = request.headers.contains("x-amz-checksum-crc32");
    const bool again = fault == Fault::kOtherRegion && std::exchange(moved_, true);
    return again || (fault == Fault::kDamaged && !safe) ? Fault::kUnavailable : fault;
  }

 private:
  std::mutex mutex_;
  std::mt19937 chance_;
  std::map<std::string, bool> last_;
  bool moved_ = false;  // a bucket moves once
};

// One seed: small objects, two writers of one name, an upload, ranges, removal.
void run_seed(uint32_t seed, const std::string& bucket) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  FaultProxy proxy(seaweed().url(),
                   [faults = std::make_shared<RandomFaults>(seed)](const ServedRequest& request) {
                     return (*faults)(request);
                   });
  Client client(seaweed().config_for(proxy.url()), bucket);
  std::mt19937 chance(seed);
  const std::string prefix = std::to_string(seed) + "/";
  std::vector<Bytes> bodies;
  for (size_t size : {0, 1, 4096, 70'000}) bodies.push_back(random_bytes(size, chance));
  std::vector<Pending<std::optional<std::string>>> puts;
  for (size_t i = 0; i < bodies.size(); ++i) {
    puts.push_back(
        client.put(prefix + std::to_string(i), {bodies[i]}, {}, crc32(bodies[i]), long_enough()));
  }
  auto mine =
      client.put(prefix + "switch", {as_bytes("mine")}, Condition::absent(), {}, long_enough());
  auto other =
      client.put(prefix + "switch", {as_bytes("other")}, Condition::absent(), {}, long_enough());
  for (auto& put : puts) EXPECT_TRUE(put.wait());
  const bool won = mine.wait().has_value(), lost = other.wait().has_value();
  EXPECT_NE(won, lost);
  EXPECT_EQ(as_text(client.get_beginning(prefix + "switch", long_enough()).wait()->bytes),
            won ? "mine" : "other");

  const std::string id = client.begin_upload(prefix + "m", true, long_enough()).wait();
  bodies = {Bytes(5 << 20, std::byte{7}), random_bytes(100'000, chance)};
  const auto parts = upload_parts(client, prefix + "m", id, bodies);
  const auto etag =
      client.complete(prefix + "m", id, parts, Condition::absent(), long_enough()).wait();
  ASSERT_TRUE(etag);
  Bytes whole;
  for (const Bytes& body : bodies) whole.insert(whole.end(), body.begin(), body.end());
  Bytes found(whole.size());
  client.get(prefix + "m", 0, found, *etag, long_enough()).wait();
  EXPECT_TRUE(found == whole);

  std::vector<std::string> keys;
  for (const Listed& each : client.list({.prefix = prefix}, long_enough()).wait().objects)
    keys.push_back(each.key);
  EXPECT_EQ(keys.size(), 6u);
  EXPECT_TRUE(client.remove(keys, long_enough()).wait().empty());
  EXPECT_TRUE(client.list({.prefix = prefix}, long_enough()).wait().objects.empty());
  EXPECT_GT(proxy.faults(), 0);
}

TEST(S3Faults, RandomOnesLeaveWhatWasWritten) {
  const std::string bucket = fresh_bucket();
  for (uint32_t seed = 1; seed <= 12; ++seed) run_seed(seed, bucket);
}

// Each fault on the first request for which `applies`, then none.
FaultProxy::Choose once(Fault fault, std::function<bool(const ServedRequest&)> applies) {
  auto done = std::make_shared<std::atomic<bool>>(false);
  return [=](const ServedRequest& request) {
    return applies(request) && !done->exchange(true) ? fault : Fault::kNone;
  };
}

bool is_put(const ServedRequest& request) { return request.method == "PUT"; }

TEST(S3Faults, EachFaultOfAConditionalPut) {
  const std::string bucket = fresh_bucket();
  for (int fault = 0; fault <= static_cast<int>(Fault::kErrorInside); ++fault) {
    const auto kind = static_cast<Fault>(fault);
    // Credentials: below. An error inside a 200 is only looked for where S3 sends one. 501 is
    // final.
    if (kind == Fault::kExpired || kind == Fault::kErrorInside || kind == Fault::kNotImplemented) {
      continue;
    }
    SCOPED_TRACE(fault);
    FaultProxy proxy(seaweed().url(), once(kind, is_put));
    Config config = seaweed().config_for(proxy.url());
    config.stall = std::chrono::seconds(1);
    Client client(config, bucket);
    const std::string key = "k" + std::to_string(fault);
    EXPECT_TRUE(client
                    .put(key, {as_bytes("mine")}, Condition::absent(), crc32(as_bytes("mine")),
                         long_enough())
                    .wait());
    EXPECT_FALSE(
        client.put(key, {as_bytes("other")}, Condition::absent(), {}, long_enough()).wait());
    EXPECT_EQ(as_text(client.get_beginning(key, long_enough()).wait()->bytes), "mine");
  }
}

// The first attempt is executed after its answer, when the second may already have been.
TEST(S3Faults, ConditionalPutThatIsExecutedLater) {
  const std::string bucket = fresh_bucket();
  for (int i = 0; i < 5; ++i) {
    FaultProxy proxy(seaweed().url(), once(Fault::kExecutedLater, is_put));
    Client client(seaweed().config_for(proxy.url()), bucket);
    const std::string key = "k" + std::to_string(i);
    EXPECT_TRUE(client.put(key, {as_bytes("mine")}, Condition::absent(), {}, long_enough()).wait());
  }
}

TEST(S3Faults, EachFaultOfACompletion) {
  const std::string bucket = fresh_bucket();
  for (const Fault fault : {Fault::kErrorInside, Fault::kErrorAfterwards, Fault::kLostAnswer,
                            Fault::kTruncated, Fault::kCutAnswer, Fault::kConflict}) {
    SCOPED_TRACE(static_cast<int>(fault));
    FaultProxy proxy(seaweed().url(), once(fault, [](const ServedRequest& request) {
                       return request.method == "POST" && request.has("?uploadId=");
                     }));
    Client client(seaweed().config_for(proxy.url()), bucket);
    const std::string key = "m" + std::to_string(static_cast<int>(fault));
    const std::string id = client.begin_upload(key, true, long_enough()).wait();
    const auto parts = upload_parts(client, key, id, {Bytes(5 << 20, std::byte{7}), Bytes(3)});
    EXPECT_TRUE(client.complete(key, id, parts, Condition::absent(), long_enough()).wait());
    EXPECT_EQ(proxy.faults(), 1);
    EXPECT_EQ(client.head(key, false, long_enough()).wait()->size, (5u << 20) + 3);
  }
}

TEST(S3Faults, EachFaultOfReads) {
  const std::string bucket = fresh_bucket();
  Client(seaweed().config(), bucket)
      .put("k", {as_bytes("0123456789")}, {}, {}, long_enough())
      .wait();
  for (const Fault fault :
       {Fault::kUnavailable, Fault::kCutAnswer, Fault::kLostAnswer, Fault::kTruncated}) {
    SCOPED_TRACE(static_cast<int>(fault));
    FaultProxy ranges(seaweed().url(),
                      once(fault, [](auto& request) { return request.has("/k"); }));
    FaultProxy lists(seaweed().url(),
                     once(fault, [](auto& request) { return request.has("list-type"); }));
    Client reader(seaweed().config_for(ranges.url()), bucket);
    Bytes bytes(4);
    reader.get("k", 3, bytes, "", long_enough()).wait();
    EXPECT_EQ(as_text(bytes), "3456");
    Client lister(seaweed().config_for(lists.url()), bucket);
    EXPECT_EQ(lister.list({}, long_enough()).wait().objects.size(), 1u);
    EXPECT_EQ(ranges.faults() + lists.faults(), 2);
  }
}

TEST(S3Faults, CredentialsExpireInMidUpload) {
  const std::string bucket = fresh_bucket();
  const std::string file = testing::TempDir() + "s3_faults_" + std::to_string(::getpid());
  const auto write = [&](const std::string& more) {
    std::ofstream(file) << "[default]\naws_access_key_id=AKIDTESTS" << more
                        << "\naws_secret_access_key=SECRETTESTS" << more << "\n";
  };
  write("");
  // From the second part on the first keys have expired, also for requests that are under way.
  std::atomic<bool> expired = false;
  FaultProxy proxy(seaweed().url(), [&](const ServedRequest& request) {
    if (request.has("partNumber=2") && !expired) {
      write("2");
      expired = true;
    }
    const bool old = request.headers.at("authorization").find("AKIDTESTS/") != std::string::npos;
    return old && expired ? Fault::kExpired : Fault::kNone;
  });
  Config config = seaweed().config_for(proxy.url());
  config.environment = {{"AWS_SHARED_CREDENTIALS_FILE", file}};
  Client client(config, bucket);
  const std::string id = client.begin_upload("m", true, long_enough()).wait();
  const auto parts = upload_parts(client, "m", id, std::vector<Bytes>(6, Bytes(1000)));
  for (const Part& part : parts) EXPECT_NE(part.etag, "");
  EXPECT_TRUE(client.abort("m", id, long_enough()).wait());
  EXPECT_GT(proxy.faults(), 0);
  std::filesystem::remove(file);
}

}  // namespace faults_test
}  // namespace tilestone::s3
