// Tests what only the POSIX storage has: direct reads, locks, syncs, and system calls that fail.
#include "tilestone/storage/posix_storage.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "tilestone/base/checksum.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/direct_writes_internal.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/one_file.h"
#include "tilestone/storage/posix_testing.h"

namespace tilestone::posix_storage_test {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

constexpr size_t kMiB = size_t{1} << 20;
const Deadline kNever = Deadline::never();

TEST(PosixStorage, LargeReadsGoStraightWhereFileAndMemoryAreAlignedAlike) {
  const uint64_t size = 20 * kMiB;
  const Bytes bytes = pattern_bytes(size);
  const TempDirectory directory;
  const auto storage =
      posix_storage(directory.path(), {.direct_read = 0}, std::make_shared<ColdSystem>(true));
  put_file(*storage, "f", bytes);
  const auto file = storage->open("f");
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  for (const uint64_t offset : {0, 64, 4032}) {
    if (kSlowBytes && offset == 4032) continue;
    for (const size_t phase : {0, 64, 100, 4032}) {
      for (const uint64_t rest : {0, 1, 4096, 5000}) {
        if (kSlowBytes && rest % 4096 != 0) continue;
        SCOPED_TRACE(std::to_string(offset) + " " + std::to_string(phase) + " " +
                     std::to_string(rest));
        PhasedMemory target(size - offset - rest, phase);
        uint32_t crc = 1;
        const ReadOp op{file.get(), offset, target.view.size(), target.view.data(), &crc};
        storage->read({&op, 1}, {nullptr, pool}, [](size_t, ByteView) {});
        const ByteView expected = ByteView(bytes).subspan(offset, target.view.size());
        EXPECT_TRUE(same_bytes(target.view, expected));
        EXPECT_EQ(crc, crc32(expected));
      }
    }
  }
}

TEST(PosixStorage, AFailedSyncIsNeverTriedAgain) {
  FailingDisk disk;
  disk.system->sync_error = EIO;
  const auto file = disk.storage->create("f");
  file->append(as_bytes("abc"));
  expect_errno([&] { file->sync(kNever); }, EIO, "f", "cannot sync a file: Input/output error");
  disk.system->sync_error = 0;  // a second sync would succeed although data is lost
  expect_errno([&] { file->sync(kNever); }, EIO, "f", "cannot sync a file");
  EXPECT_EQ(disk.system->syncs, 1);
}

TEST(PosixStorage, AFailedCloseOrDirectorySyncIsAnError) {
  FailingDisk disk;
  disk.system->close_error = EIO;
  const auto file = disk.storage->create("f");
  expect_errno([&] { file->close(); }, EIO, "f", "cannot close a file");
  disk.system->sync_error = EDQUOT;
  expect_errno([&] { disk.storage->settle(""); }, EDQUOT, disk.directory.path(),
               "cannot sync a directory");
}

TEST(PosixStorage, AReadErrorNamesRangeAndFileAndEndsTheBatch) {
  FailingDisk disk({.direct_read = UINT64_MAX});
  put_file(*disk.storage, "f", pattern_bytes(4 * kMiB));
  const auto file = disk.storage->open("f");
  disk.system->read_error = EIO;
  std::vector<ReadOp> ops;
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  for (uint64_t i = 0; i < 8; ++i) ops.push_back({file.get(), i * 4096, 4096, nullptr});
  ThreadPool threads(2);
  ReadOptions options;
  options.buffers = pool;
  options.threads = &threads;
  expect_errno(
      [&] { disk.storage->read(ops, options, [](size_t, ByteView) { ADD_FAILURE() << "done"; }); },
      EIO, "f", "cannot read 4096 bytes at offset ");
  for (size_t i = 0; i < pool->buffers(); ++i) EXPECT_TRUE(pool->try_acquire());
}

TEST(PosixStorage, AFileThatShrankWhileOpenIsCorrupt) {
  for (const uint64_t direct : {uint64_t{0}, UINT64_MAX}) {
    const TempDirectory directory;
    const auto storage = posix_storage(directory.path(), {.direct_read = direct},
                                       std::make_shared<ColdSystem>(true));
    put_file(*storage, "f", pattern_bytes(3 * kMiB));
    const auto file = storage->open("f");
    ASSERT_EQ(::truncate((directory.path() + "/f").c_str(), kMiB + 5), 0);
    Bytes target(3 * kMiB);
    const ReadOp op{file.get(), 0, target.size(), target.data()};
    ReadOptions options;
    options.buffers = BufferPool::create(8 * kMiB, 4 * kMiB);
    expect_error([&] { storage->read({&op, 1}, options, [](size_t, ByteView) {}); },
                 ErrorCode::kCorrupt, "1048581 bytes");
  }
}

TEST(PosixStorage, ManyFilesShareAPoolSmallerThanTheirQueues) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path(), {.direct_write = 0});
  const auto pool = BufferPool::create(3 * kMiB, kMiB);
  ThreadPool threads(4);
  threads.parallel_for(6, [&](size_t i) {
    const auto file = storage->create("f" + std::to_string(i));
    append_numbered(*file, *pool, 10, kMiB);
    file->sync(kNever);
    file->close();
  });
  EXPECT_EQ(storage->list().size(), 6u);
}

TEST(PosixStorage, TheRootAndItsParentsAreMade) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path() + "/a/b//c/");
  EXPECT_EQ(storage->list(), Names{});
  EXPECT_FALSE(storage->stat("f").has_value());
  put_file(*storage, "f", as_bytes("abc"));
  EXPECT_TRUE(fs::exists(directory.path() + "/a/b/c/f"));
}

TEST(PosixStorage, ADirectoryRemovedUnderWayIsNotFound) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path() + "/root");
  storage->directories()->make("sub");
  fs::remove_all(directory.path() + "/root");
  expect_error([&] { storage->create("sub/f"); }, ErrorCode::kNotFound, "sub/f");
  expect_error([&] { storage->settle("sub"); }, ErrorCode::kNotFound, "sub");
  EXPECT_NE(storage->claim("lock"), nullptr);  // who takes the lock begins again
  const auto held = storage->held();
  fs::remove_all(directory.path() + "/root");
  expect_error([&] { held->create("f"); }, ErrorCode::kNotFound, "f");
  expect_error([&] { held->create("sub/f"); }, ErrorCode::kNotFound, "sub");
  expect_error([&] { held->claim("lock"); }, ErrorCode::kNotFound, "lock");
}

TEST(PosixStorage, TwoStoragesOfOneDirectoryShareTheirLocks) {
  const TempDirectory directory;
  const auto one = posix_storage(directory.path()), two = posix_storage(directory.path());
  auto lock = one->claim("lock");
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(two->claim("lock"), nullptr);
  lock.reset();
  EXPECT_NE(two->claim("lock"), nullptr);
}

// If the test may not mount, it uses /dev/full as the full disk, which returns the kernel's ENOSPC.
TEST(PosixStorage, ARealFullDiskIsReportedAndOldFilesStay) {
  const SmallMount disk;
  if (!disk) {
    std::byte byte{1};
    const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
    System system;
    expect_errno([&] { write_at(system, full.get(), "full", {&byte, 1}, 0); }, ENOSPC, "full",
                 "cannot write 1 bytes at offset 0: No space left on device");
    return;
  }
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  for (const uint64_t direct : {uint64_t{0}, PosixOptions().direct_write, UINT64_MAX}) {
    const auto storage = posix_storage(disk.path(), {.direct_write = direct});
    if (!storage->stat("old")) put_file(*storage, "old", as_bytes("old"));
    for (const uint64_t expected : {uint64_t{0}, uint64_t{8 * kMiB}}) {
      const auto file = storage->create("big", expected);
      try {
        append_numbered(*file, *pool, 8, kMiB);
        file->sync(kNever);
        ADD_FAILURE() << "8 MiB were written to a disk of 4 MiB";
      } catch (const Error& error) {
        EXPECT_EQ(error.sys_errno(), ENOSPC) << error.what();
        EXPECT_EQ(fs::path(error.file()).filename(), "big");
      }
      storage->remove("big");
    }
    const Bytes large(8 * kMiB, std::byte{1});
    expect_errno([&] { storage->publish("old", "t", large, true, kNever); }, ENOSPC, "t",
                 "No space left on device");
    EXPECT_EQ(storage->list(), Names{"old"});
    EXPECT_EQ(as_text(read_file(*storage, "old", 9)), "old");
  }
}

// If the test may not mount, the mode of a directory makes it read-only.
TEST(PosixStorage, AReadOnlyDirectoryCanBeReadAndNotWritten) {
  const SmallMount disk;
  const TempDirectory directory;
  const std::string root = disk ? disk.path() : directory.path();
  const auto storage = posix_storage(root);
  put_file(*storage, "f", as_bytes("abc"));
  if (disk) {
    ASSERT_TRUE(disk.make_read_only());
  } else {
    ASSERT_EQ(::chmod(root.c_str(), 0555), 0);
  }
  const int error = disk ? EROFS : EACCES;
  EXPECT_EQ(as_text(read_file(*storage, "f", 9)), "abc");
  EXPECT_EQ(storage->list(), Names{"f"});
  expect_errno([&] { storage->create("g"); }, error, "g", "cannot create a file");
  expect_errno([&] { storage->remove("f"); }, error, "f", "cannot remove a file");
  expect_errno([&] { storage->directories()->make("d"); }, error, "d", "cannot make a directory");
  expect_errno([&] { storage->rename("f", "g", false); }, error, "f", "cannot rename");
}

// Else a reader of one file would hold, and find, all that lies beside it.
TEST(PosixStorage, OneFileOfADirectoryHasNoDirectories) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path());
  for (const char* name : {"a", "b"}) put_file(*storage, name, as_bytes("abc"));
  const auto file = one_file(storage, "a");
  EXPECT_EQ(file->directories(), nullptr);
  EXPECT_EQ(file->held()->list(), Names{"a"});
  EXPECT_EQ(file->until(kNever)->list(), Names{"a"});
}

}  // namespace tilestone::posix_storage_test
