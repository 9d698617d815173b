// Tests how the POSIX storage brings ranges into the page cache.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>

#include "tilestone/storage/posix_testing.h"

namespace tilestone::posix_prefetch_test {

constexpr size_t kMiB = size_t{1} << 20;

// Returns whether the page cache holds the ranges that were prefetched.
bool prefetches_into_the_page_cache(FailingDisk& disk) {
  Storage& storage = *disk.storage;
  const Bytes bytes = pattern_bytes(6 * kMiB);
  put_file(storage, "f", bytes);
  const int fd = ::open((disk.directory.path() + "/f").c_str(), O_RDONLY);
  EXPECT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  System system;
  const auto cached = [&](uint64_t offset, uint64_t size) {
    uint64_t count = 0;
    EXPECT_EQ(system.cached_bytes(fd, offset, size, count), 0);
    return count;
  };
  EXPECT_EQ(cached(0, bytes.size()), 0u);
  const auto file = storage.open("f");
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const std::vector<ReadOp> ops = {{file.get(), kMiB, kMiB}, {file.get(), 4 * kMiB, kMiB}};
  EXPECT_TRUE(storage.facts().shared_cache);
  EXPECT_EQ(storage.prefetch(ops, {nullptr, pool}), 2 * kMiB);
  const bool found = storage.prefetch(ops, {nullptr, pool}) == 0 && cached(kMiB, kMiB) == kMiB &&
                     cached(4 * kMiB, kMiB) == kMiB;
  EXPECT_LE(cached(0, bytes.size()), 3 * kMiB);
  const ReadOp large{file.get(), 0, 2 * kMiB};
  expect_error([&] { storage.prefetch({&large, 1}, {nullptr, pool}); }, ErrorCode::kInvalidArgument,
               "larger buffer");
  ::close(fd);
  return found;
}

TEST(PosixPrefetch, WhatIsPrefetchedIsReadFromThePageCache) {
  EXPECT_TRUE(in_some_trial([] {
    FailingDisk disk;
    return prefetches_into_the_page_cache(disk);
  }));
}

TEST(PosixPrefetch, PrefetchingReadsWhereTheKernelCannotPopulate) {
  EXPECT_TRUE(in_some_trial([] {
    FailingDisk disk;
    disk.system->will_need_missing = true;
    disk.system->populate_missing = true;
    return prefetches_into_the_page_cache(disk);
  }));
}

TEST(PosixPrefetch, PrefetchingMoreBlocksThanAreReadAtOnceBringsInAll) {
  for (const bool missing : {false, true}) {
    EXPECT_TRUE(in_some_trial([&] {
      FailingDisk disk;
      disk.system->populate_missing = missing;
      put_file(*disk.storage, "f", pattern_bytes(8 * kMiB));
      const int fd = ::open((disk.directory.path() + "/f").c_str(), O_RDONLY);
      EXPECT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
      const auto file = disk.storage->open("f");
      std::vector<ReadOp> ops;
      for (uint64_t at = 0; at < 8 * kMiB; at += kMiB / 4) {
        ops.push_back({file.get(), at, kMiB / 4});
      }
      const auto pool = BufferPool::create(kMiB / 2, kMiB / 4);  // two buffers
      EXPECT_EQ(disk.storage->prefetch(ops, {nullptr, pool}), 8 * kMiB);
      uint64_t cached = 0;
      EXPECT_EQ(System().cached_bytes(fd, 0, 8 * kMiB, cached), 0);
      ::close(fd);
      return cached == 8 * kMiB;
    }));
  }
}

TEST(PosixPrefetch, APrefetchThatCannotReadNamesTheFile) {
  FailingDisk disk;
  put_file(*disk.storage, "f", pattern_bytes(kMiB));
  const auto file = disk.storage->open("f");
  const int fd = ::open((disk.directory.path() + "/f").c_str(), O_RDWR);
  ASSERT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  ::close(fd);
  disk.system->populate_missing = true;
  disk.system->read_error = EIO;
  const auto pool = BufferPool::create(kMiB, kMiB);
  const ReadOp op{file.get(), 0, kMiB};
  expect_errno([&] { disk.storage->prefetch({&op, 1}, {nullptr, pool}); }, EIO, "f", "cannot read");
}

}  // namespace tilestone::posix_prefetch_test
