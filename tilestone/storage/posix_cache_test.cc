// Tests which ranges are read from the page cache if the file system hides the cached pages.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>

#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::posix_cache_test {

// Finds no cached page of an open file, as on overlayfs, where the pages belong to another file.
class HidingSystem : public System {
 public:
  std::atomic<int> direct_reads = 0, trials = 0;
  std::atomic<bool> hides = true;

  ssize_t pread(int fd, void* data, size_t size, uint64_t offset) override {
    direct_reads += (::fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    trials += size == 1;
    return System::pread(fd, data, size, offset);
  }
  int cached_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes) override {
    const int result = System::cached_bytes(fd, offset, size, bytes);
    if (hides) bytes = 0;
    return result;
  }
  std::unique_ptr<IoQueue> uring_queue(unsigned, int& error) override {
    error = EPERM;
    return nullptr;
  }
};

TEST(PosixCache, WhatIsThereIsTakenFromItThoughTheFileSystemHidesIt) {
  EXPECT_TRUE(in_some_trial([] {
    const TempDirectory directory;
    const auto system = std::make_shared<HidingSystem>();
    PosixOptions options;
    options.direct_write = UINT64_MAX;
    const auto storage = posix_storage(directory.path(), options, system);
    const Bytes bytes = pattern_bytes(4u << 20);
    put_file(*storage, "f", bytes);
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(same_bytes(read_file(*storage, "f", bytes.size()), bytes));
    }
    const auto file = storage->open("f");
    const ReadOp op{file.get(), 0, 1u << 20, nullptr};
    ReadOptions reading;
    reading.buffers = BufferPool::create(4u << 20, 1u << 20);
    const bool found = system->direct_reads == 0 && system->trials == 1;
    return found && storage->prefetch({&op, 1}, reading) == 0;
  }));
}

TEST(PosixCache, WhatIsFoundThereNeedsNoTrial) {
  const TempDirectory directory;
  const auto system = std::make_shared<HidingSystem>();
  system->hides = false;
  PosixOptions options;
  options.direct_write = UINT64_MAX;
  const auto storage = posix_storage(directory.path(), options, system);
  put_file(*storage, "f", pattern_bytes(1u << 20));
  read_file(*storage, "f", 1u << 20);
  EXPECT_EQ(system->trials, 0);
}

}  // namespace tilestone::posix_cache_test
