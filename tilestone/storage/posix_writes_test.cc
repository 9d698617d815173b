// Tests how the POSIX storage writes: direct I/O, reserved room, full disks, FUSE.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "tilestone/storage/posix_testing.h"

namespace tilestone::posix_writes_test {

constexpr PosixOptions kDirect{.direct_write = 0};

constexpr size_t kMiB = size_t{1} << 20;
const Deadline kNever = Deadline::never();

TEST(PosixWrites, ADirectWriteThatDoesNotFitSaysHowMuchAndWhere) {
  FailingDisk disk(kDirect);
  disk.system->room = 0;
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const auto file = disk.storage->create("full");
  expect_errno(
      [&] {
        append_numbered(*file, *pool, 1, kMiB);
        file->sync(kNever);
      },
      ENOSPC, "full", "cannot write 1048576 bytes at offset 0: No space left on device");
  // Later calls fail too, and all buffers are back in the pool.
  expect_errno([&] { file->sync(kNever); }, ENOSPC, "full", "No space left");
  expect_errno([&] { file->close(); }, ENOSPC, "full", "No space left");
  EXPECT_EQ(disk.system->syncs, 0);
  for (size_t i = 0; i < pool->buffers(); ++i) EXPECT_TRUE(pool->try_acquire());
}

TEST(PosixWrites, ADiskThatFillsUpInTheMiddleOfAFileIsReportedAtTheRightOffset) {
  for (const uint64_t direct : {uint64_t{0}, UINT64_MAX}) {
    FailingDisk disk({.direct_write = direct});
    disk.system->room = 2 * kMiB + 8192;
    const auto pool = BufferPool::create(4 * kMiB, kMiB);
    const auto file = disk.storage->create("full");
    expect_errno(
        [&] {
          append_numbered(*file, *pool, 3, kMiB);
          file->sync(kNever);
        },
        ENOSPC, "full", "cannot write 1040384 bytes at offset 2105344");
  }
}

TEST(PosixWrites, AFullDiskIsFoundOutBeforeALargeFileIsWritten) {
  FailingDisk disk;
  disk.system->reserve_error = ENOSPC;
  const auto pool = BufferPool::create(2 * kMiB, kMiB);
  const auto file = disk.storage->create("f", 100 * kMiB);
  expect_errno([&] { append_numbered(*file, *pool, 1, kMiB); }, ENOSPC, "f",
               "cannot reserve 104857600 bytes");
}

TEST(PosixWrites, RoomThatWasReservedTooMuchIsGivenBack) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path());
  const auto pool = BufferPool::create(2 * kMiB, kMiB);
  const auto file = storage->create("f", 64 * kMiB);
  append_numbered(*file, *pool, 2, kMiB);
  file->sync(kNever);
  struct stat info;
  ASSERT_EQ(::stat((directory.path() + "/f").c_str(), &info), 0);
  EXPECT_EQ(info.st_size, static_cast<off_t>(2 * kMiB));
  EXPECT_LE(info.st_blocks * 512, static_cast<off_t>(3 * kMiB));
}

// A file system would run direct writes that lengthen a file one after the other.
TEST(PosixWrites, NoDirectWriteLengthensAFileThatHasRoomReserved) {
  FailingDisk disk(kDirect);
  disk.system->reserve_error = 0;
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const Bytes bytes = pattern_bytes(3 * kMiB);
  PhasedMemory kept(2 * kMiB, 0);
  std::copy_n(bytes.begin(), 2 * kMiB, kept.view.begin());
  const auto file = disk.storage->create("f", 4 * kMiB);  // less than is appended
  append_numbered(*file, *pool, 40, kMiB);
  file->append_kept(kept.view);
  EXPECT_EQ(disk.system->writes_lengthening, 0);
  file->close();
  EXPECT_GT(disk.system->direct_writes, 0);
  EXPECT_EQ(disk.system->writes_lengthening, 0);
  EXPECT_EQ(disk.storage->stat("f")->size, 42 * kMiB);  // close truncates it without a sync
}

TEST(PosixWrites, WhatAReservationThatFailedHasLengthenedIsCut) {
  FailingDisk disk(kDirect);
  disk.system->reserve_error = 0;
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const auto file = disk.storage->create("f", 2 * kMiB);
  append_numbered(*file, *pool, 2, kMiB);
  disk.system->no_more_room = true;
  append_numbered(*file, *pool, 3, kMiB);
  file->sync(kNever);
  EXPECT_EQ(disk.storage->stat("f")->size, 5 * kMiB);
}

TEST(PosixWrites, AfterAShortDirectWriteTheNextOneIsAligned) {
  FailingDisk disk(kDirect);
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  disk.system->most_written = 3 * kMiB / 10;  // in the middle of a page
  const auto file = disk.storage->create("f", 3 * kMiB);
  append_numbered(*file, *pool, 3, kMiB);
  file->sync(kNever);
  file->close();
  EXPECT_GE(disk.system->direct_writes, 12);
  EXPECT_EQ(disk.system->writes_unaligned, 0);
  const Bytes written = read_file(*disk.storage, "f", 4 * kMiB);
  ASSERT_EQ(written.size(), 3 * kMiB);
  for (size_t i = 0; i < written.size(); ++i) {
    ASSERT_EQ(written[i], static_cast<std::byte>(i / kMiB + 1)) << i;
  }
}

TEST(PosixWrites, KeptMemoryIsWrittenDirectlyWhereItIsAligned) {
  FailingDisk disk(kDirect);
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const Bytes bytes = pattern_bytes(3 * kMiB);
  PhasedMemory kept(2 * kMiB, 0);
  std::copy_n(bytes.begin(), 2 * kMiB, kept.view.begin());
  const auto file = disk.storage->create("f", 3 * kMiB);
  file->append_kept(kept.view);
  EXPECT_EQ(file->size(), 2 * kMiB);
  file->append(ByteView(bytes).subspan(2 * kMiB));
  file->sync(kNever);
  EXPECT_EQ(disk.system->direct_writes, 1);
  EXPECT_TRUE(same_bytes(read_file(*disk.storage, "f", 4 * kMiB), bytes));
}

TEST(PosixWrites, AFailedWriteOfKeptMemoryIsReported) {
  FailingDisk disk(kDirect);
  disk.system->room = kMiB;
  PhasedMemory kept(2 * kMiB, 0);
  const auto file = disk.storage->create("f");
  expect_errno(
      [&] {
        file->append_kept(kept.view);
        file->sync(kNever);
      },
      ENOSPC, "f", "cannot write 1048576 bytes at offset 1048576");
}

// File systems over object stores fail if a write does not continue at the end (VeOmni 801).
TEST(PosixWrites, FilesOfFuseAreWrittenInOrder) {
  FailingDisk disk;
  disk.system->fuse = true;
  disk.system->reserve_error = 0;
  const auto pool = BufferPool::create(8 * kMiB, kMiB);
  const Bytes kept = pattern_bytes(4 * kMiB);
  const auto file = disk.storage->create("f", 32 * kMiB);
  append_numbered(*file, *pool, 5, kMiB);
  file->append_kept(kept);
  file->append(as_bytes("tail"));
  append_numbered(*file, *pool, 3, kMiB - 5);
  file->sync(kNever);
  file->close();
  EXPECT_EQ(disk.system->writes_elsewhere, 0);
  EXPECT_EQ(disk.system->direct_writes, 0);
  const Bytes found = read_file(*disk.storage, "f", 32 * kMiB);
  ASSERT_EQ(found.size(), 9 * kMiB + 4 + 3 * (kMiB - 5));
  EXPECT_TRUE(same_bytes(ByteView(found).subspan(5 * kMiB, 4 * kMiB), kept));
  EXPECT_EQ(found[4 * kMiB], std::byte{5});
  EXPECT_EQ(found.back(), std::byte{3});
}

TEST(PosixWrites, WritesThatTheFileSystemRefusesToDoDirectlyGoThroughThePageCache) {
  FailingDisk disk(kDirect);
  disk.system->direct_write_error = EINVAL;
  const auto pool = BufferPool::create(8 * kMiB, kMiB);
  const auto file = disk.storage->create("f");
  append_numbered(*file, *pool, 12, kMiB);
  file->sync(kNever);
  file->close();
  const Bytes bytes = read_file(*disk.storage, "f", 12 * kMiB);
  ASSERT_EQ(bytes.size(), 12 * kMiB);
  for (size_t i = 0; i < bytes.size(); i += 4096) {
    ASSERT_EQ(bytes[i], static_cast<std::byte>(i / kMiB + 1));
  }
}

TEST(PosixWrites, LargeFilesAreWrittenDirectlyAndSmallOnesThroughThePageCache) {
  FailingDisk disk;
  const auto pool = BufferPool::create(8 * kMiB, kMiB);
  put_file(*disk.storage, "small", pattern_bytes(10'000));
  EXPECT_EQ(disk.system->direct_writes, 0);
  const auto file = disk.storage->create("large", 4 * kMiB);
  append_numbered(*file, *pool, 4, kMiB);
  file->sync(kNever);
  EXPECT_EQ(disk.system->direct_writes, 4);
}

}  // namespace tilestone::posix_writes_test
