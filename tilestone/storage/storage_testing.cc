#include "tilestone/storage/storage_testing.h"

#include <stdlib.h>
#include <sys/mount.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <random>
#include <thread>

#include "tilestone/base/checksum.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/directories.h"

namespace tilestone {

TempDirectory::TempDirectory(const std::string& parent) {
  std::string path = parent + (parent.ends_with('/') ? "" : "/") + "tilestone-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) {
    throw Error(ErrorCode::kIo, "cannot make a temporary directory").with_file(path);
  }
  path_ = path;
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

SmallMount::SmallMount() : mounted_(::mount("tmpfs", path(), "tmpfs", 0, "size=4m") == 0) {}

SmallMount::~SmallMount() {
  if (mounted_) ::umount2(path(), MNT_DETACH);
}

bool SmallMount::make_read_only() const {
  return ::mount(nullptr, path(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) == 0;
}

Bytes pattern_bytes(size_t size, uint64_t seed) {
  Bytes bytes(size);
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (size_t i = 0; i < size; i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(bytes.data() + i, &state, std::min<size_t>(8, size - i));
  }
  return bytes;
}

bool same_bytes(ByteView a, ByteView b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

bool in_some_trial(const std::function<bool()>& trial) {
  for (int i = 0; i < 5; ++i) {
    if (trial()) return true;
  }
  return false;
}

void put_file(Storage& storage, const std::string& name, ByteView bytes) {
  const auto file = storage.create(name, bytes.size());
  file->append(bytes);
  file->sync(Deadline::never());
  file->close();
}

void expect_error(const std::function<void()>& call, ErrorCode code, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error was thrown, expected " << to_string(code);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kBuffer = 1 * kMiB;

// Appends `bytes` in pooled buffers of at most `most` bytes each.
void append_buffers(WritableFile& file, BufferPool& pool, ByteView bytes, size_t most) {
  while (!bytes.empty()) {
    Buffer buffer = pool.acquire();
    const size_t size = std::min({most, bytes.size(), buffer.capacity()});
    std::memcpy(buffer.data(), bytes.data(), size);
    buffer.set_size(size);
    file.append(std::move(buffer));
    bytes = bytes.subspan(size);
  }
}

Bytes read_range(Storage& storage, const ReadableFile& file, uint64_t offset, size_t size,
                 std::shared_ptr<BufferPool> pool = nullptr) {
  Bytes target(size, std::byte{0xEE});
  const ReadOp op{&file, offset, size, target.data()};
  ReadOptions options;
  options.buffers = std::move(pool);
  size_t calls = 0;
  storage.read({&op, 1}, options, [&](size_t index, ByteView bytes) {
    EXPECT_EQ(index, 0u);
    EXPECT_EQ(bytes.size(), size);
    ++calls;
  });
  EXPECT_EQ(calls, 1u);
  return target;
}

using Names = std::vector<std::string>;

TEST_P(StorageConformance, FilesOfEverySizeComeBackAsWritten) {
  const auto pool = BufferPool::create(16 * kMiB, 8 * kMiB);
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{511}, size_t{512}, size_t{4095}, size_t{4096}, size_t{4097},
        kMiB, 8 * kMiB - 1, 8 * kMiB, 8 * kMiB + 1, 17 * kMiB + 4096}) {
    if (kSlowBytes && size > kMiB && size != 8 * kMiB + 1) continue;
    SCOPED_TRACE(size);
    const std::string name = "size-" + std::to_string(size);
    const Bytes bytes = pattern_bytes(size, size);
    for (const uint64_t expected : {uint64_t{0}, uint64_t{size}, uint64_t{2 * size}}) {
      const auto file = storage().create(name, expected);
      append_buffers(*file, *pool, bytes, 8 * kMiB);
      EXPECT_EQ(file->size(), size);
      EXPECT_EQ(file->name(), name);
      file->sync(Deadline::never());
      file->close();
      ASSERT_TRUE(storage().stat(name).has_value());
      EXPECT_EQ(storage().stat(name)->size, size);
      EXPECT_TRUE(storage().stat(name)->regular);
      EXPECT_TRUE(same_bytes(read_file(storage(), name, size), bytes));
      storage().remove(name);
    }
  }
}

TEST_P(StorageConformance, ManyAppendsOfAnySizeFollowOneAnother) {
  const auto pool = BufferPool::create(4 * kBuffer, kBuffer);
  const Bytes bytes = pattern_bytes(6 * kMiB, 3);
  std::mt19937_64 random(7);
  const auto file = storage().create("many", bytes.size());
  append_buffers(*file, *pool, ByteView(bytes).first(3 * kMiB), kBuffer);  // aligned
  for (size_t at = 3 * kMiB; at < bytes.size();) {
    const size_t size = std::min<size_t>(random() % 100'000, bytes.size() - at);
    if (random() % 2 == 0) {
      file->append(ByteView(bytes).subspan(at, size));
    } else {
      append_buffers(*file, *pool, ByteView(bytes).subspan(at, size), kBuffer);
    }
    at += size;
    EXPECT_EQ(file->size(), at);
  }
  file->sync(Deadline::never());
  file->close();
  EXPECT_TRUE(same_bytes(read_file(storage(), "many", bytes.size()), bytes));
}

TEST_P(StorageConformance, ReadsAnyRangeIntoAnyMemory) {
  const auto pool = BufferPool::create(4 * kBuffer, kBuffer);
  const Bytes bytes = pattern_bytes(5 * kMiB + 123, 5);
  put_file(storage(), "ranges", bytes);
  const auto file = storage().open("ranges");
  EXPECT_EQ(file->size(), bytes.size());
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    uint64_t offset = random() % (bytes.size() + 1);
    if (round % 3 == 0) offset = offset / 4096 * 4096;
    const uint64_t limit = round % 4 != 0 ? 10'000 : bytes.size();
    const uint64_t size = std::min<uint64_t>(random() % limit, bytes.size() - offset);
    SCOPED_TRACE("offset " + std::to_string(offset) + " size " + std::to_string(size));
    const Bytes got = read_range(storage(), *file, offset, size, round % 5 == 0 ? nullptr : pool);
    ASSERT_TRUE(same_bytes(got, ByteView(bytes).subspan(offset, size)));
  }
}

TEST_P(StorageConformance, KeptMemoryOfAnySizeFollowsWhatWasAppended) {
  const auto pool = BufferPool::create(16 * kMiB, kBuffer);
  const Bytes bytes = pattern_bytes(5 * kMiB);
  std::mt19937_64 random(11);
  for (int round = 0; round < 10; ++round) {
    const std::string name = "kept-" + std::to_string(round);
    const auto file = storage().create(name, bytes.size());
    for (ByteView rest = bytes; !rest.empty();) {
      const size_t most = std::min<size_t>(rest.size(), random() % 3 == 0 ? 5000 : 2 * kMiB);
      size_t size = 1 + random() % most;
      if (random() % 2 == 0 && size > 4096) size = size / 4096 * 4096;
      if (random() % 2 == 0) {
        file->append_kept(rest.first(size));
      } else {
        append_buffers(*file, *pool, rest.first(size), kBuffer);
      }
      rest = rest.subspan(size);
    }
    file->sync(Deadline::never());
    file->close();
    EXPECT_TRUE(same_bytes(read_file(storage(), name, bytes.size()), bytes));
  }
}

TEST_P(StorageConformance, ReadsGiveTheirChecksums) {
  const auto pool = BufferPool::create(16 * kMiB, kBuffer);
  const Bytes bytes = pattern_bytes(19 * kMiB);
  put_file(storage(), "f", bytes);
  const auto file = storage().open("f");
  std::mt19937_64 random(5);
  Bytes target(bytes.size());
  ThreadPool threads(2);
  for (int round = 0; round < 20; ++round) {
    const bool pooled = round % 3 == 0;
    const uint64_t most = pooled ? kBuffer / 2 : round % 3 == 1 ? bytes.size() : 60'000;
    const uint64_t size = random() % most;
    const uint64_t offset = random() % (bytes.size() - size);
    uint32_t crc = 1, seen = 0;
    const ReadOp op{file.get(), offset, size, pooled ? nullptr : target.data() + offset, &crc};
    storage().read({&op, 1}, {&threads, pool}, [&](size_t, ByteView) { seen = crc; });
    EXPECT_EQ(crc, crc32(ByteView(bytes).subspan(offset, size)));
    EXPECT_EQ(seen, crc);
  }
}

TEST_P(StorageConformance, ABatchOverThreadsCallsDoneOnceForEachOp) {
  const auto pool = BufferPool::create(3 * kBuffer, kBuffer);
  const Bytes bytes = pattern_bytes(9 * kMiB + 5, 8);
  put_file(storage(), "batch", bytes);
  const auto file = storage().open("batch");
  std::mt19937_64 random(13);
  std::vector<ReadOp> ops;
  Bytes memory(20 * kMiB);
  size_t used = 1;  // unaligned
  for (int i = 0; i < 300; ++i) {
    const uint64_t offset = random() % bytes.size();
    const uint64_t size = std::min<uint64_t>(random() % 60'000, bytes.size() - offset);
    ops.push_back({file.get(), offset, size, i % 2 == 0 ? nullptr : memory.data() + used});
    if (i % 2 != 0) used += size;
  }
  ops.push_back({file.get(), 0, bytes.size(), memory.data() + used});
  ops.push_back({file.get(), 77, kBuffer, nullptr});  // fills the buffer, unaligned
  ThreadPool threads(3);
  ReadOptions options;
  options.threads = &threads;
  options.buffers = pool;
  std::vector<std::atomic<int>> calls(ops.size());
  storage().read(ops, options, [&](size_t index, ByteView got) {
    calls[index].fetch_add(1);
    const ReadOp& op = ops[index];
    EXPECT_EQ(got.size(), op.size);
    if (op.target != nullptr) {
      EXPECT_EQ(got.data(), op.target);
    }
    EXPECT_TRUE(same_bytes(got, ByteView(bytes).subspan(op.offset, op.size)));
  });
  for (const auto& count : calls) EXPECT_EQ(count.load(), 1);
}

TEST_P(StorageConformance, ReadingBeyondTheEndIsCorrupt) {
  put_file(storage(), "short", pattern_bytes(1000));
  const auto file = storage().open("short");
  Bytes target(2000);
  const auto read = [&](uint64_t offset, uint64_t size) {
    const ReadOp op{file.get(), offset, size, target.data()};
    storage().read({&op, 1}, {}, [](size_t, ByteView) { ADD_FAILURE() << "done was called"; });
  };
  expect_error([&] { read(0, 1001); }, ErrorCode::kCorrupt, "short");
  expect_error([&] { read(1000, 1); }, ErrorCode::kCorrupt, "1000 bytes");
  expect_error([&] { read(UINT64_MAX, 2); }, ErrorCode::kCorrupt);
  expect_error([&] { read(2, UINT64_MAX); }, ErrorCode::kCorrupt);
}

TEST_P(StorageConformance, AnOpWithoutTargetMustFitABuffer) {
  put_file(storage(), "f", pattern_bytes(10'000));
  const auto file = storage().open("f");
  const ReadOp op{file.get(), 0, 10'000, nullptr};
  const auto ignore = [](size_t, ByteView) {};
  expect_error([&] { storage().read({&op, 1}, {}, ignore); }, ErrorCode::kInvalidArgument, "f");
  ReadOptions options;
  options.buffers = BufferPool::create(4096, 4096);
  expect_error([&] { storage().read({&op, 1}, options, ignore); }, ErrorCode::kInvalidArgument);
}

TEST_P(StorageConformance, AnErrorThrownByDoneEndsTheBatchAndComesOut) {
  const auto pool = BufferPool::create(4 * kBuffer, kBuffer);
  put_file(storage(), "f", pattern_bytes(4 * kMiB));
  const auto file = storage().open("f");
  ThreadPool threads(2);
  for (const bool threaded : {false, true}) {
    std::vector<ReadOp> ops;
    for (uint64_t i = 0; i < 64; ++i) ops.push_back({file.get(), i * 65'536, 65'536, nullptr});
    ReadOptions options;
    options.buffers = pool;
    options.threads = threaded ? &threads : nullptr;
    expect_error(
        [&] {
          storage().read(ops, options, [](size_t index, ByteView) {
            if (index == 20) throw Error(ErrorCode::kMismatch, "from done");
          });
        },
        ErrorCode::kMismatch, "from done");
    for (size_t i = 0; i < pool->buffers(); ++i) EXPECT_TRUE(pool->acquire());  // none is leaked
  }
}

TEST_P(StorageConformance, AnExpiredDeadlineIsATimeout) {
  put_file(storage(), "f", pattern_bytes(100));
  const auto file = storage().open("f");
  Bytes target(100);
  const ReadOp op{file.get(), 0, 100, target.data()};
  ReadOptions options;
  options.deadline = Deadline::after(std::chrono::seconds(0));
  expect_error([&] { storage().read({&op, 1}, options, [](size_t, ByteView) {}); },
               ErrorCode::kTimeout);
  const auto writable = storage().create("g");
  expect_error([&] { writable->sync(options.deadline); }, ErrorCode::kTimeout, "g");
}

TEST_P(StorageConformance, AClosedFileRefusesWrites) {
  const auto file = storage().create("f");
  EXPECT_EQ(storage().stat("f").has_value(), storage().directories() != nullptr);
  file->append(as_bytes("abc"));
  file->sync(Deadline::never());
  file->close();
  expect_error([&] { file->append(as_bytes("d")); }, ErrorCode::kInvalidArgument, "f");
  expect_error([&] { file->sync(Deadline::never()); }, ErrorCode::kInvalidArgument);
  EXPECT_EQ(as_text(read_file(storage(), "f", 10)), "abc");
}

TEST_P(StorageConformance, WhatIsNotThereIsNotFound) {
  expect_error([&] { storage().open("absent"); }, ErrorCode::kNotFound, "absent");
  EXPECT_NO_THROW(storage().remove("absent"));
  EXPECT_NO_THROW(storage().remove("no/such"));
  EXPECT_FALSE(storage().stat("absent").has_value());
  EXPECT_FALSE(storage().stat("no/such").has_value());
  EXPECT_EQ(storage().list("absent"), Names{});
}

TEST_P(StorageConformance, ListGivesFilesOfTheWholeSubtreeSorted) {
  if (Directories* const own = storage().directories()) own->make("empty");
  for (const char* name : {"d/e/2", "d/1", "b", "a", "d0", "d/e/1"}) {
    put_file(storage(), name, {});
  }
  EXPECT_EQ(storage().list(), (Names{"a", "b", "d/1", "d/e/1", "d/e/2", "d0"}));
  EXPECT_EQ(storage().list("d"), (Names{"d/1", "d/e/1", "d/e/2", "d0"}));
  EXPECT_EQ(storage().list("d/"), (Names{"d/1", "d/e/1", "d/e/2"}));
  EXPECT_EQ(storage().list("d/e/1"), Names{"d/e/1"});
  EXPECT_EQ(storage().list("d/e/1/"), Names{});
}

TEST_P(StorageConformance, UnsafeNamesAreRefusedByEveryCall) {
  put_file(storage(), "good", {});
  for (const std::string& name : {std::string(), std::string("/etc/passwd"), std::string("../x"),
                                  std::string("a/../b"), std::string("."), std::string("a/."),
                                  std::string("a//b"), std::string("a/"), std::string("a\0b", 3)}) {
    SCOPED_TRACE("\"" + name + "\"");
    const auto refused = [](const std::function<void()>& call) {
      expect_error(call, ErrorCode::kUnsafe, "unsafe file name");
    };
    refused([&] { storage().create(name); });
    refused([&] { storage().open(name); });
    refused([&] { storage().stat(name); });
    refused([&] { storage().remove(name); });
    refused([&] { storage().claim(name); });
    refused([&] { storage().is_claimed(name); });
    if (!name.empty()) refused([&] { storage().settle(name); });  // "" is the root
    if (storage().directories() == nullptr) continue;
    refused([&] { storage().rename(name, "x", true); });
    refused([&] { storage().rename("good", name, true); });
    if (!name.empty()) refused([&] { storage().directories()->make(name); });
  }
  EXPECT_EQ(storage().list(), Names{"good"});
}

TEST_P(StorageConformance, UnusualNamesAreKeptByteForByte) {
  Names names = {"\x7f", " ", "-rf", "A", "a", "caf\xc3\xa9", "cafe\xcc\x81", "...", "a\\b"};
  if (storage().directories() != nullptr) names.emplace_back("\x01");  // XML can't say it
  for (const std::string& name : names) put_file(storage(), name, as_bytes(name));
  EXPECT_EQ(storage().list().size(), names.size());
  for (const std::string& name : names) {
    EXPECT_EQ(as_text(read_file(storage(), name, 100)), name);
  }
}

TEST_P(StorageConformance, PublishingReplacesWholeFilesAndCleansUp) {
  storage().publish("p", "p.tmp", as_bytes("one"), false, Deadline::never());
  expect_error([&] { storage().publish("p", "p.tmp", as_bytes("two"), false, Deadline::never()); },
               ErrorCode::kAlreadyExists, "p");
  EXPECT_FALSE(storage().put("p", as_bytes("2"), Condition::absent(), "p.tmp", Deadline::never()));
  EXPECT_EQ(storage().facts().put_if_absent, true);
  EXPECT_EQ(storage().list(), Names{"p"});
  EXPECT_EQ(as_text(read_file(storage(), "p", 10)), "one");
  storage().publish("p", "p.tmp", as_bytes("three"), true, Deadline::never());
  EXPECT_EQ(storage().list(), Names{"p"});
  EXPECT_EQ(as_text(read_file(storage(), "p", 10)), "three");
  EXPECT_TRUE(
      storage().put("p", as_bytes("three"), Condition::always(), "q.tmp", Deadline::never()));
  EXPECT_TRUE(storage().put("q", as_bytes("q"), Condition::absent(), "q.tmp", Deadline::never()));
  storage().remove("q");
  expect_error([&] { read_file(storage(), "p", 4); }, ErrorCode::kCorrupt, "at most 4");
}

TEST_P(StorageConformance, OfManyThreadsThatCreateOrPublishOneNameOneWins) {
  constexpr int kThreads = 8;
  std::atomic<int> created = 0, published = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const std::string mine = "shared/deep/tmp-" + std::to_string(i);
      const auto attempt = [](std::atomic<int>& wins, const std::function<void()>& call) {
        try {
          call();
          ++wins;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists) << error.what();
        }
      };
      attempt(created, [&] {
        const auto one = storage().create("one");
        one->append(as_bytes(mine));
        one->close();
      });
      attempt(published, [&] {
        storage().publish("shared/deep/p", mine, as_bytes(mine), false, Deadline::never());
      });
      const Bytes own = pattern_bytes(300'000, static_cast<uint64_t>(i));
      put_file(storage(), mine, own);
      EXPECT_TRUE(same_bytes(read_file(storage(), mine, own.size()), own));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(created, 1);
  EXPECT_EQ(published, 1);
  EXPECT_EQ(storage().list().size(), 2u + kThreads);
}

TEST_P(StorageConformance, ALinkOutlivesTheFileAndIsNotPossibleEverywhere) {
  const Bytes bytes = pattern_bytes(100'000);
  put_file(storage(), "a/f", bytes);
  const std::shared_ptr<Storage> own = storage().shared_from_this();
  const auto link = [&](const StorageEntry& from, const std::string& name) {
    return storage().link(from, name, Deadline::never());
  };
  EXPECT_FALSE(link({own, "a/none"}, "b/none"));
  EXPECT_FALSE(link({own, "none/f"}, "b/none"));
  if (!link({own, "a/f"}, "b/deep/f")) return;  // it can't link
  storage().settle("b/deep");
  EXPECT_TRUE(link({own->child("a"), "f"}, "g"));
  storage().remove("a/f");
  EXPECT_TRUE(same_bytes(read_file(storage(), "b/deep/f", UINT64_MAX), bytes));
  EXPECT_TRUE(same_bytes(read_file(storage(), "g", UINT64_MAX), bytes));
  if (storage().directories() == nullptr) return;
  expect_error([&] { link({own, "g"}, "b/deep/f"); }, ErrorCode::kAlreadyExists);
  EXPECT_FALSE(link({own, "b/deep"}, "h"));  // a directory
  expect_error([&] { link({own, "g"}, "../h"); }, ErrorCode::kUnsafe);
  expect_error([&] { link({own, "../g"}, "h"); }, ErrorCode::kUnsafe);
}

TEST_P(StorageConformance, FilesOfAnotherStorageAreRefused) {
  const TestedStorage other = GetParam().make();
  put_file(*other.storage, "f", as_bytes("abc"));
  const auto file = other.storage->open("f");
  std::byte target[3];
  const ReadOp op{file.get(), 0, 3, target};
  // A memory storage has no paths that could be confused; its files hold their own bytes.
  if (storage().describe() == other.storage->describe()) return;
  expect_error([&] { storage().read({&op, 1}, {}, [](size_t, ByteView) {}); },
               ErrorCode::kInvalidArgument, "another storage");
}

}  // namespace

// The tests of other folders link this file too and need not run the suite.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(StorageConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DirectoryConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ObjectConformance);

}  // namespace tilestone
