#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <set>

#include "tilestone/base/checksum.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"
#include "tilestone/storage/system_internal.h"

namespace tilestone::cache_policy_test {

constexpr uint64_t kMiB = 1u << 20;

// Makes a file that has no pages in the page cache.
struct ColdFile {
  explicit ColdFile(uint64_t size) : bytes(pattern_bytes(size)) {
    put_file(*storage, "f", bytes);
    fd = ::open((directory.path() + "/f").c_str(), O_RDONLY);
    EXPECT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    EXPECT_EQ(cached(0, size), 0u);
    file = storage->open("f");
  }
  ~ColdFile() { ::close(fd); }
  uint64_t cached(uint64_t offset, uint64_t size) const {
    uint64_t count = 0;
    EXPECT_EQ(System().cached_bytes(fd, offset, size, count), 0);
    return count;
  }

  TempDirectory directory;
  std::shared_ptr<Storage> storage = posix_storage(directory.path());
  Bytes bytes;
  int fd = -1;
  std::unique_ptr<ReadableFile> file;
};

// Reads two ranges of a file on `disk`: one into its own memory, one into pooled buffers.
void read_two_ranges(ColdFile& disk, CachePolicy cache, size_t threads) {
  Bytes target(20 * kMiB + 100);
  uint32_t crc = 0;
  std::vector<ReadOp> ops = {{disk.file.get(), 3 * kMiB + 7, target.size(), target.data(), &crc}};
  for (uint64_t at = 32 * kMiB; at < 40 * kMiB; at += kMiB) {
    ops.push_back({disk.file.get(), at, kMiB});
  }
  ThreadPool pool(threads);
  ReadOptions options{&pool, BufferPool::create(2 * kMiB, kMiB)};
  options.cache = cache;
  std::atomic<size_t> done = 0;
  disk.storage->read(ops, options, [&](size_t i, ByteView bytes) {
    EXPECT_TRUE(same_bytes(bytes, ByteView(disk.bytes).subspan(ops[i].offset, ops[i].size)));
    ++done;
  });
  EXPECT_EQ(done, ops.size());
  EXPECT_EQ(crc, crc32(target));
}

TEST(CachePolicy, KeepLeavesInThePageCacheWhatWasReadAndNothingMore) {
  for (const size_t threads : {1, 3}) {
    EXPECT_TRUE(in_some_trial([&] {
      ColdFile disk(64 * kMiB);
      read_two_ranges(disk, CachePolicy::kKeep, threads);
      EXPECT_LE(disk.cached(0, 64 * kMiB), 29 * kMiB);
      return disk.cached(3 * kMiB, 20 * kMiB) >= 20 * kMiB &&
             disk.cached(32 * kMiB, 8 * kMiB) == 8 * kMiB;
    })) << threads
        << " threads";
  }
}

// The real system, but for large folios, which it may lack.
class CountingSystem : public System {
 public:
  explicit CountingSystem(bool missing) : missing_(missing) {}
  int populate_large_folios(int fd, uint64_t offset, uint64_t size) override {
    ++asked;
    if (!missing_) return System::populate_large_folios(fd, offset, size);
    errno = EINVAL;
    return -1;
  }
  std::atomic<int> asked = 0;

 private:
  const bool missing_;
};

TEST(CachePolicy, VeryLargeRangesToKeepAreReadWithAndWithoutLargeFolios) {
  for (const bool missing : {false, true}) {
    ColdFile disk(80 * kMiB);
    const auto system = std::make_shared<CountingSystem>(missing);
    const auto storage = posix_storage(disk.directory.path(), {}, system);
    const auto file = storage->open("f");
    Bytes target(disk.bytes.size());
    const ReadOp op{file.get(), 0, target.size(), target.data()};
    ReadOptions options{nullptr, BufferPool::create(8 * kMiB, 8 * kMiB)};
    options.cache = CachePolicy::kKeep;
    storage->read({&op, 1}, options, [](size_t, ByteView) {});
    EXPECT_TRUE(same_bytes(target, disk.bytes));
    EXPECT_GT(system->asked, 0);
  }
}

TEST(CachePolicy, BypassLeavesLargeRangesOutOfThePageCache) {
  ColdFile disk(64 * kMiB);
  read_two_ranges(disk, CachePolicy::kBypass, 2);
  EXPECT_LE(disk.cached(0, 64 * kMiB), kMiB);
}

TEST(CachePolicy, KeepReadsAgainWithoutTheDisk) {
  EXPECT_TRUE(in_some_trial([] {
    ColdFile disk(64 * kMiB);
    read_two_ranges(disk, CachePolicy::kKeep, 2);
    Bytes target(20 * kMiB);
    const ReadOp op{disk.file.get(), 3 * kMiB + 8, target.size(), target.data()};
    ReadOptions options{nullptr, BufferPool::create(2 * kMiB, kMiB)};
    EXPECT_EQ(disk.storage->prefetch({}, options), 0u);
    const ReadOp whole[] = {{disk.file.get(), 4 * kMiB, kMiB}, {disk.file.get(), 33 * kMiB, kMiB}};
    const uint64_t prefetched = disk.storage->prefetch(whole, options);
    disk.storage->read({&op, 1}, options, [](size_t, ByteView) {});
    EXPECT_TRUE(same_bytes(target, ByteView(disk.bytes).subspan(op.offset, op.size)));
    return prefetched == 0;
  }));
}

// A system on which nothing is in the page cache and nothing is really read: a read takes the time
// that a test sets, and its bytes are counted by the way in which it is made.
class TimedSystem : public System {
 public:
  double keep_rate = 1, direct_rate = 1;  // MiB per second
  std::atomic<uint64_t> kept = 0, direct = 0;
  uint64_t memory = 0;

  int set_direct(int fd, bool on) override {
    const std::lock_guard lock(mutex_);
    if (on) direct_fds_.insert(fd);
    return 0;
  }
  ssize_t pread(int fd, void*, size_t size, uint64_t) override {
    const std::lock_guard lock(mutex_);
    if (direct_fds_.contains(fd)) spend(direct, size, direct_rate);
    return static_cast<ssize_t>(size);
  }
  void will_need(int, uint64_t, uint64_t size) override {
    const std::lock_guard lock(mutex_);
    spend(kept, size, keep_rate);
  }
  int cached_bytes(int, uint64_t, uint64_t, uint64_t& bytes) override {
    bytes = 0;
    return 0;
  }
  int resident_bytes(int, uint64_t, uint64_t, uint64_t& bytes) override {
    bytes = 0;
    return 0;
  }
  uint64_t available_memory() override { return memory; }
  double seconds() override {
    const std::lock_guard lock(mutex_);
    return seconds_;
  }
  std::unique_ptr<IoQueue> uring_queue(unsigned, int& error) override {
    error = ENOSYS;
    return nullptr;
  }

 private:
  void spend(std::atomic<uint64_t>& counter, uint64_t size, double rate) {
    counter += size;
    seconds_ += static_cast<double>(size) / static_cast<double>(kMiB) / rate;
  }

  std::mutex mutex_;
  double seconds_ = 0;
  std::set<int> direct_fds_;
};

// Reads files of such a system with CachePolicy::kAuto.
struct AutoReads {
  static constexpr uint64_t kBlock = 8 * kMiB;

  TempDirectory directory;
  std::shared_ptr<TimedSystem> system = std::make_shared<TimedSystem>();
  std::shared_ptr<Storage> storage = posix_storage(directory.path(), {}, system);

  struct Counts {
    uint64_t kept, direct;  // MiB
    friend bool operator==(const Counts&, const Counts&) = default;
  };
  Counts read(uint64_t mib, CacheRoom& room) {
    const std::string path = directory.path() + "/f";
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(mib * kMiB)), 0);  // no blocks on the disk
    ::close(fd);
    const auto file = storage->open("f");
    std::vector<ReadOp> ops;
    for (uint64_t at = 0; at < mib * kMiB; at += kBlock) ops.push_back({file.get(), at, kBlock});
    ReadOptions options{nullptr, BufferPool::create(4 * kBlock, kBlock)};
    options.cache = CachePolicy::kAuto;
    options.room = &room;
    system->kept = system->direct = 0;
    storage->read(ops, options, [](size_t, ByteView) {});
    return {system->kept / kMiB, system->direct / kMiB};
  }
};

using Counts = AutoReads::Counts;

TEST(CachePolicy, AutoKeepsAfterOneWindowPastTheCacheWhereThatIsNotClearlyFaster) {
  AutoReads reads;
  reads.system->direct_rate = 1.1;
  CacheRoom room(uint64_t{8} << 30);
  EXPECT_EQ(reads.read(1280, room), (Counts{1280 - 64, 64}));
  EXPECT_EQ(reads.read(1280, room), (Counts{1280, 0}));  // the verdict holds
  EXPECT_EQ(room.left(), (uint64_t{8} << 30) - (2 * 1280 - 64) * kMiB);
}

TEST(CachePolicy, AutoBypassesAfterThreeKeptWindowsWhereThatIsClearlyFaster) {
  AutoReads reads;
  reads.system->direct_rate = 1.4;
  CacheRoom room(uint64_t{8} << 30);
  EXPECT_EQ(reads.read(1280, room), (Counts{3 * 64, 1280 - 3 * 64}));
  EXPECT_EQ(reads.read(1280, room), (Counts{0, 1280}));
}

TEST(CachePolicy, AutoKeepsSmallBatchesUntriedAndNoMoreThanTheRoom) {
  AutoReads reads;
  reads.system->direct_rate = 1.4;
  CacheRoom room(1000 * kMiB);
  EXPECT_EQ(reads.read(640, room), (Counts{640, 0}));
  EXPECT_EQ(reads.read(1280, room), (Counts{360, 1280 - 360}));
  EXPECT_EQ(reads.read(1280, room), (Counts{0, 1280}));
}

TEST(CachePolicy, TheAvailableMemoryIsWhatTheSystemSays) {
  AutoReads reads;
  reads.system->memory = 7 * kMiB;
  EXPECT_EQ(reads.storage->available_cache(), 7 * kMiB);
  EXPECT_EQ(reads.storage->child("a")->available_cache(), 7 * kMiB);
  PosixOptions direct;
  direct.read_cache = PosixOptions::Cache::kDirect;
  EXPECT_EQ(posix_storage(reads.directory.path(), direct, reads.system)->available_cache(), 0u);
}

}  // namespace tilestone::cache_policy_test
