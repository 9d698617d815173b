// The store over a real server: the conformance suite, and what only an object store has.
#include "tilestone/storage/s3/store.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/s3/client.h"
#include "tilestone/storage/s3/local_server_testing.h"
#include "tilestone/storage/s3/real_server_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone {

const std::vector<StorageCase>& s3_cases() {
  static const auto fresh = [](const std::string& more) {
    static int count = 0;
    static const bool made = (s3::seaweed().create_bucket("conformance"), true);
    const std::string prefix = "p" + std::to_string(count++) + more;
    return s3::s3_store({made ? "conformance" : "", prefix}, s3::seaweed().config());
  };
  static const std::vector<StorageCase> cases = {
      {"seaweed", [] { return TestedStorage{fresh("/a"), nullptr}; }},
      {"child_of_seaweed", [] { return TestedStorage{fresh("")->child("a/child"), nullptr}; }}};
  return cases;
}

INSTANTIATE_TEST_SUITE_P(S3, StorageConformance, testing::Values(s3_cases()[0]), storage_case_name);
INSTANTIATE_TEST_SUITE_P(S3, ObjectConformance, testing::ValuesIn(s3_cases()), storage_case_name);

namespace s3::store_test {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::UnorderedElementsAre;

Deadline in_time() { return Deadline::after(std::chrono::seconds(30)); }

std::string fresh_bucket(RealServer& server) {
  static int count = 0;
  const std::string name = "store-" + std::to_string(count++);
  server.create_bucket(name);
  return name;
}

TEST(S3Url, IsABucketAndALiteralPrefix) {
  const auto parsed = [](const char* text) {
    const Url url = parse_url(text);
    return url.bucket + " " + url.prefix;
  };
  EXPECT_EQ(parsed("s3://bucket"), "bucket ");
  EXPECT_EQ(parsed("s3://bucket/"), "bucket ");
  EXPECT_EQ(parsed("s3://bucket/a/b?c/"), "bucket a/b?c");
  for (const char* const text : {"s3:///x", "s3://", "s3:/bucket/x", "bucket/x", "s3://b/../c",
                                 "s3://b/.", "s3://b//c", "s3://b/a//c", "s3://b/a//"}) {
    expect_error([&] { parse_url(text); }, ErrorCode::kInvalidArgument, "s3://bucket/prefix");
  }
}

TEST(S3Store, APrefixNeverListsAnotherThatBeginsLikeIt) {
  const std::string bucket = fresh_bucket(seaweed());
  const auto at = [&](const char* prefix) {
    return s3_store({bucket, prefix}, seaweed().config());
  };
  put_file(*at("run1"), "f", as_bytes("1"));
  put_file(*at("run10"), "g", as_bytes("10"));
  put_file(*at("run1/"), "in/h", as_bytes("1"));
  EXPECT_THAT(at("run1")->list(), ElementsAre("f", "in/h"));
  EXPECT_THAT(at("")->list_directories(), ElementsAre("run1", "run10"));
  EXPECT_EQ(at("run1")->describe(), "s3://" + bucket + "/run1");
  EXPECT_EQ(at("")->describe(), "s3://" + bucket);
}

TEST(S3Store, ListsAndRemovesMoreThanAPage) {
  const auto store = s3_store({fresh_bucket(seaweed()), "many"}, seaweed().config());
  std::vector<std::string> names;
  for (int i = 0; i < 1'005; ++i) names.push_back("f" + std::to_string(10'000 + i));
  for (const std::string& name : names) put_file(*store, name, {});
  EXPECT_EQ(store->list(), names);
  store->remove(names);
  EXPECT_THAT(store->list(), ElementsAre());
}

TEST(S3Store, FindsOutWhichConditionsABucketHas) {
  const auto with = s3_store({fresh_bucket(seaweed()), "p"}, seaweed().config());
  EXPECT_TRUE(with->put("note", as_bytes("a"), Condition::absent(), "s", in_time()));
  EXPECT_TRUE(with->facts().put_if_absent && with->facts().put_if_tag);
  EXPECT_FALSE(with->put("note", as_bytes("b"), Condition::absent(), "s", in_time()));

  const auto without = s3_store({fresh_bucket(rclone()), "p"}, rclone().config());
  EXPECT_TRUE(without->put("note", as_bytes("a"), Condition::absent(), "s", in_time()));
  EXPECT_FALSE(without->facts().put_if_absent || without->facts().put_if_tag);
  EXPECT_FALSE(without->put("note", as_bytes("b"), Condition::absent(), "s", in_time()));
  EXPECT_EQ(as_text(read_file(*without, "note", 10)), "a");
  const auto asks = [](const std::shared_ptr<Storage>& store) {
    store->put("note", as_bytes("c"), Condition::has("\"t\""), "s", in_time());
  };
  expect_error([&] { asks(without); }, ErrorCode::kUnsupported, "If-Match");
  const auto fresh = s3_store({fresh_bucket(rclone()), "p"}, rclone().config());
  expect_error([&] { asks(fresh); }, ErrorCode::kUnsupported, "If-Match");
  EXPECT_THAT(fresh->list(), ElementsAre());
}

TEST(S3Store, FindsConditionsUnderANameThatNobodyElseUses) {
  std::mutex mutex;
  std::vector<std::string> puts;
  FaultProxy proxy(seaweed().url(), [&](const ServedRequest& request) {
    const std::lock_guard lock(mutex);
    if (request.method == "PUT") puts.push_back(request.target.substr(request.target.rfind('/')));
    return Fault::kNone;
  });
  const std::string bucket = fresh_bucket(seaweed());
  put_file(*s3_store({bucket, "p"}, seaweed().config()), "note", as_bytes("other"));
  const auto store = s3_store({bucket, "p"}, seaweed().config_for(proxy.url()));
  EXPECT_FALSE(store->put("note", as_bytes("a"), Condition::absent(), "s", in_time()));
  EXPECT_TRUE(store->facts().put_if_absent && store->facts().put_if_tag);
  EXPECT_THAT(puts, ElementsAre("/s", "/s", "/s", "/note"));
  EXPECT_THAT(store->list(), ElementsAre("note"));
}

TEST(S3Store, ABucketThatAnswers501ToConditionsHasNone) {
  FaultProxy proxy(seaweed().url(), [](const ServedRequest& request) {
    const bool asks = request.headers.contains("if-match") && request.method == "PUT";
    return asks || request.headers.contains("if-none-match") ? Fault::kNotImplemented
                                                             : Fault::kNone;
  });
  const std::string bucket = fresh_bucket(seaweed());
  const auto of_process = [&] {
    return s3_store({bucket, "p"}, seaweed().config_for(proxy.url()));
  };
  const auto store = of_process();
  EXPECT_TRUE(store->put("note", as_bytes("a"), Condition::absent(), "s", in_time()));
  EXPECT_FALSE(store->put("note", as_bytes("b"), Condition::absent(), "s", in_time()));
  EXPECT_FALSE(store->facts().put_if_absent || store->facts().put_if_tag);
  const auto rank = of_process();
  put_file(*rank, "small", as_bytes("abc"));
  put_file(*of_process(), "large", pattern_bytes(9 << 20));
  EXPECT_TRUE(rank->put("note2", as_bytes("a"), Condition::absent(), "s", in_time()));
  EXPECT_FALSE(rank->facts().put_if_absent || rank->facts().put_if_tag);
  EXPECT_THAT(store->list(), ElementsAre("large", "note", "note2", "small"));
}

TEST(S3Store, ALockedObjectIsNoRemovedOne) {
  const std::string bucket = "locked";
  LocalServer server([](const ServedRequest&) {
    return ServedAnswer{.body =
                            "<DeleteResult><Error><Key>p/a</Key><Code>AccessDenied</Code>"
                            "<Message>object is WORM protected</Message></Error></DeleteResult>"};
  });
  Config config = seaweed().config_for(server.url());
  const auto store = s3_store({bucket, "p"}, config);
  const std::vector<std::string> names = {"a", "b"};
  expect_error([&] { store->remove(names); }, ErrorCode::kIo, "WORM");
}

// Counts requests on their way to the server.
class Counted {
 public:
  Counted()
      : proxy_(seaweed().url(), [this](const ServedRequest& request) {
          const std::lock_guard lock(mutex_);
          requests_.push_back(request.method);
          return Fault::kNone;
        }) {}
  std::shared_ptr<Storage> store(const std::string& bucket) {
    return s3_store({bucket, "p"}, seaweed().config_for(proxy_.url()));
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(requests_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> requests_;
  FaultProxy proxy_;
};

// As it is left by a process that has died.
TEST(S3Store, UnfinishedUploadsAreDiscardedAndTheOthersGoOn) {
  Counted counted;
  const auto above = counted.store(fresh_bucket(seaweed()));
  const auto store = above->child("c");
  const Bytes bytes = pattern_bytes(9 << 20);
  const auto begin = [&](const std::string& name) {
    auto file = store->create(name);
    file->append(bytes);
    return file;
  };
  const auto dead = begin("dead"), too = begin("dead too"), alive = begin("alive");
  std::vector<std::string> seen;
  const auto discard = [&] {
    seen.clear();
    counted.take();
    store->discard_unfinished("", [&](const std::string& name) {
      seen.push_back(name);
      return name.starts_with("dead");
    });
    return std::ranges::count(counted.take(), "GET");
  };
  EXPECT_EQ(discard(), 2);
  EXPECT_THAT(seen, UnorderedElementsAre("alive", "dead", "dead too"));
  EXPECT_EQ(discard(), 1);
  EXPECT_THAT(seen, ElementsAre("alive"));
  alive->sync(in_time());
  EXPECT_THROW(dead->sync(in_time()), Error);
  EXPECT_THROW(too->sync(in_time()), Error);
  EXPECT_THAT(above->list(), ElementsAre("c/alive"));
}

TEST(S3Store, RequestsOfWritesAndReads) {
  Counted counted;
  const auto store = counted.store(fresh_bucket(seaweed()));
  const Bytes large = pattern_bytes(20 << 20);
  const auto file = store->create("large", large.size());
  file->append_kept(large);
  file->sync(in_time());
  file->close();
  EXPECT_THAT(counted.take(), ElementsAre("POST", "PUT", "PUT", "PUT", "POST"));
  put_file(*store, "small", as_bytes("abc"));
  EXPECT_THAT(counted.take(), ElementsAre("PUT"));
  EXPECT_EQ(as_text(read_file(*store, "small", 3)), "abc");
  EXPECT_THAT(counted.take(), ElementsAre("GET"));
  EXPECT_TRUE(same_bytes(read_file(*store, "large", large.size()), large));
  EXPECT_THAT(counted.take(), ElementsAre("GET", "GET", "GET", "GET"));
}

TEST(S3Store, ALargeReadIsCutWhereThePartsOfTheObjectBegin) {
  std::mutex mutex;
  std::set<std::string> ranges;
  FaultProxy proxy(seaweed().url(), [&](const ServedRequest& request) {
    const std::lock_guard lock(mutex);
    if (request.method == "GET") ranges.insert(request.headers.at("range"));
    return Fault::kNone;
  });
  const auto store = s3_store({fresh_bucket(seaweed()), "p"}, seaweed().config_for(proxy.url()));
  constexpr uint64_t kMiB = 1 << 20;
  const Bytes object = pattern_bytes(20 * kMiB);
  put_file(*store, "f", object);
  const auto file = store->open("f");
  Bytes found(16 * kMiB + 5);
  std::vector<uint32_t> sums(6, 1);
  ReadOp op{file.get(), 3 * kMiB, found.size(), found.data(), sums.data(), 3 * kMiB};
  ThreadPool threads(2);
  ReadOptions options;
  options.threads = &threads;
  store->read({&op, 1}, options, [](size_t, ByteView) {});
  const ByteView expected = ByteView(object).subspan(op.offset, op.size);
  EXPECT_TRUE(same_bytes(found, expected));
  for (size_t i = 0; i < sums.size(); ++i) {
    const ByteView rest = expected.subspan(i * op.crc_bytes);
    EXPECT_EQ(sums[i], crc32(rest.first(std::min<size_t>(rest.size(), op.crc_bytes)))) << i;
  }
  const auto range = [](uint64_t begin, uint64_t end) {
    return fmt::format("bytes={}-{}", begin, end - 1);
  };
  EXPECT_THAT(ranges,
              UnorderedElementsAre(range(0, 64 << 10), range(3 * kMiB, 8 * kMiB),
                                   range(8 * kMiB, 16 * kMiB), range(16 * kMiB, 19 * kMiB + 5)));
}

// A worker of the read needs a buffer while another one has the only one, or has failed with it.
TEST(S3Store, OneBufferIsEnoughForAllOpsOfARead) {
  const auto store = s3_store({fresh_bucket(seaweed()), "p"}, seaweed().config());
  const Bytes object = pattern_bytes(1 << 20);
  put_file(*store, "f", object);
  const auto file = store->open("f");
  std::vector<ReadOp> ops;
  for (uint64_t at = 0; at < object.size(); at += 100'000) {
    ops.push_back({file.get(), at, std::min<uint64_t>(object.size() - at, 50'000)});
  }
  ThreadPool threads(3);
  for (ThreadPool* const used : {static_cast<ThreadPool*>(nullptr), &threads}) {
    ReadOptions options;
    options.threads = used;
    options.buffers = BufferPool::create(1 << 20, 1 << 20);
    options.deadline = in_time();
    std::atomic<size_t> right = 0;
    const auto compare = [&](size_t op, ByteView bytes) {
      right += same_bytes(bytes, ByteView(object).subspan(ops[op].offset, ops[op].size)) ? 1 : 0;
    };
    store->read(ops, options, compare);
    EXPECT_EQ(right, ops.size());
    const auto fail = [](size_t, ByteView) { throw Error(ErrorCode::kCorrupt, "first"); };
    expect_error([&] { store->read(ops, options, fail); }, ErrorCode::kCorrupt, "first");
  }
}

TEST(S3Store, EveryCallOfASaveOrLoadEndsSoonAfterItsDeadline) {
  LocalServer silent(
      [](const ServedRequest&) { return ServedAnswer{.delay = std::chrono::minutes(1)}; });
  Config config = seaweed().config_for(silent.url());
  const auto store = s3_store({"bucket", "p"}, config)->child("c")->until(Deadline::after(0s));
  std::vector<std::function<void()>> calls = {[&] { store->open("f"); }, [&] { store->stat("f"); },
                                              [&] { store->list(); }, [&] { store->remove("f"); },
                                              [&] { store->is_claimed("f"); }};
  std::vector<std::jthread> threads;
  for (const auto& call : calls) {
    threads.emplace_back([&] { expect_error(call, ErrorCode::kTimeout, "1 attempts"); });
  }
}

TEST(S3Store, AFileThatIsGivenUpLeavesNoUpload) {
  const std::string bucket = fresh_bucket(seaweed());
  const auto store = s3_store({bucket, "p"}, seaweed().config());
  const Bytes bytes = pattern_bytes(9 << 20);
  Client client(seaweed().config(), bucket);
  const auto uploads = [&] { return client.uploads("p/", std::nullopt, in_time()).wait().uploads; };
  const Upload others = {"p/f", client.begin_upload("p/f", false, in_time()).wait()};
  {
    const auto file = store->create("f", bytes.size());
    file->append_kept(bytes);
    EXPECT_EQ(uploads().size(), 2u);
  }
  EXPECT_THAT(uploads(), ElementsAre(others));
  EXPECT_THAT(store->list(), ElementsAre());
}

TEST(S3Store, ASecondUploadOfALostAnswerIsAborted) {
  const std::string bucket = fresh_bucket(seaweed());
  std::atomic<bool> lost = false;
  FaultProxy proxy(seaweed().url(), [&](const ServedRequest& request) {
    return request.has("?uploads") && !lost.exchange(true) ? Fault::kLostAnswer : Fault::kNone;
  });
  const auto store = s3_store({bucket, "p"}, seaweed().config_for(proxy.url()));
  const Bytes bytes = pattern_bytes(9 << 20);
  put_file(*store, "f", bytes);
  EXPECT_TRUE(same_bytes(read_file(*store, "f", bytes.size()), bytes));
  Client client(seaweed().config(), bucket);
  EXPECT_TRUE(client.uploads("p/", std::nullopt, in_time()).wait().uploads.empty());
  EXPECT_EQ(proxy.faults(), 1);
}

TEST(S3Store, AnObjectThatWasReplacedIsNoLongerRead) {
  const auto store = s3_store({fresh_bucket(seaweed()), "p"}, seaweed().config());
  put_file(*store, "f", pattern_bytes(100'000, 1));
  const auto file = store->open("f");
  EXPECT_TRUE(store->put("f", pattern_bytes(100'000, 2), Condition::always(), "s", in_time()));
  Bytes bytes(50'000);
  const ReadOp op{file.get(), 50'000, bytes.size(), bytes.data()};
  expect_error([&] { store->read({&op, 1}, {}, [](size_t, ByteView) {}); }, ErrorCode::kNotFound,
               "replaced");
}

}  // namespace s3::store_test
}  // namespace tilestone
