#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

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

}  // namespace tilestone::cache_policy_test
