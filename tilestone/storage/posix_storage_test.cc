// Tests what only the POSIX storage has: a page cache, direct I/O, locks, and system calls that
// fail.
#include "tilestone/storage/posix_storage.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>

#include "tilestone/base/checksum.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/direct_writes_internal.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::posix_storage_test {

namespace fs = std::filesystem;
using Calls = PosixOptions::Calls;
using Cache = PosixOptions::Cache;
using Names = std::vector<std::string>;

constexpr size_t kMiB = size_t{1} << 20;
const Deadline kNever = Deadline::never();

// The real system with a disk of `room` bytes and with failures that a test requests. It uses the
// queue over threads, so that all reads and writes go through this class.
class FailingSystem : public System {
 public:
  std::atomic<uint64_t> room = UINT64_MAX;  // bytes of a file that fit
  std::atomic<int> read_error = 0, write_error = 0, direct_write_error = 0;
  std::atomic<int> sync_error = 0, close_error = 0, reserve_error = EOPNOTSUPP;
  std::atomic<int> syncs = 0, direct_writes = 0;
  bool no_more_room = false;  // a reservation lengthens the file, then fails with ENOSPC
  bool fuse = false;
  bool will_need_missing = false;
  bool populate_missing = false;
  std::atomic<int> writes_elsewhere = 0;        // writes that do not start at the file's end
  std::atomic<int> writes_lengthening = 0;      // direct writes beyond the file's end
  std::atomic<int> writes_unaligned = 0;        // direct writes at an unaligned offset
  std::atomic<size_t> most_written = SIZE_MAX;  // most bytes that a direct write reports as written

  ssize_t pread(int fd, void* data, size_t size, uint64_t offset) override {
    if (read_error != 0) return refuse(read_error);
    return System::pread(fd, data, size, offset);
  }
  ssize_t read_cached(int fd, void* data, size_t size, uint64_t offset) override {
    if (read_error != 0) return refuse(read_error);
    return System::read_cached(fd, data, size, offset);
  }
  ssize_t pwrite(int fd, const void* data, size_t size, uint64_t offset) override {
    const bool direct = (::fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    direct_writes += direct;
    struct stat info;
    const uint64_t length = ::fstat(fd, &info) == 0 ? static_cast<uint64_t>(info.st_size) : 0;
    writes_elsewhere += length != offset;
    writes_lengthening += direct && offset + size > length;
    if (write_error != 0) return refuse(write_error);
    if (direct && direct_write_error != 0) return refuse(direct_write_error);
    if (offset >= room) return refuse(ENOSPC);
    writes_unaligned += direct && offset % BufferPool::kAlignment != 0;
    const ssize_t n = System::pwrite(fd, data, std::min<uint64_t>(size, room - offset), offset);
    return direct ? std::min(n, static_cast<ssize_t>(std::min<size_t>(most_written, SSIZE_MAX)))
                  : n;
  }
  int fsync(int fd) override {
    ++syncs;
    return sync_error != 0 ? refuse(sync_error) : System::fsync(fd);
  }
  int close(int fd) override {
    System::close(fd);
    return close_error != 0 ? refuse(close_error) : 0;
  }
  int reserve(int fd, uint64_t size) override {
    if (reserve_error != 0) return refuse(reserve_error);
    const int result = System::reserve(fd, size);
    return no_more_room ? refuse(ENOSPC) : result;
  }
  bool is_fuse(int) override { return fuse; }
  void will_need(int fd, uint64_t offset, uint64_t size) override {
    if (!will_need_missing) System::will_need(fd, offset, size);
  }
  int populate(int fd, uint64_t offset, uint64_t size) override {
    return populate_missing ? refuse(EINVAL) : System::populate(fd, offset, size);
  }
  std::unique_ptr<IoQueue> uring_queue(unsigned, int& error) override {
    error = ENOSYS;
    return nullptr;
  }

 private:
  static int refuse(int error) {
    errno = error;
    return -1;
  }
};

struct Failing {
  explicit Failing(PosixOptions options = {})
      : system(std::make_shared<FailingSystem>()),
        storage(posix_storage(directory.path(), options, system)) {}
  TempDirectory directory;
  std::shared_ptr<FailingSystem> system;
  std::shared_ptr<Storage> storage;
};

void append_buffers(WritableFile& file, BufferPool& pool, size_t count, size_t size) {
  for (size_t i = 0; i < count; ++i) {
    Buffer buffer = pool.acquire();
    std::fill_n(buffer.data(), size, static_cast<std::byte>(i + 1));
    buffer.set_size(size);
    file.append(std::move(buffer));
  }
}

// Runs `call`, which must fail with this errno and the path of this file.
void expect_errno(const std::function<void()>& call, int error, const std::string& name,
                  const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const Error& caught) {
    EXPECT_EQ(caught.code(), ErrorCode::kIo) << caught.what();
    EXPECT_EQ(caught.sys_errno(), error) << caught.what();
    EXPECT_EQ(fs::path(caught.file()).filename(), fs::path(name).filename());
    // The message has the system's reason only once.
    const std::string what = caught.what();
    EXPECT_NE(what.find(text), std::string::npos) << what;
    const std::string why = std::strerror(error);
    EXPECT_EQ(what.find(why), what.rfind(why)) << what;
  }
}

TEST(PosixStorage, ADirectWriteThatDoesNotFitSaysHowMuchAndWhere) {
  Failing disk({Calls::kPlain, Cache::kDirect, Cache::kAuto, 4});
  disk.system->room = 0;
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const auto file = disk.storage->create("full");
  expect_errno(
      [&] {
        append_buffers(*file, *pool, 1, kMiB);
        file->sync(kNever);
      },
      ENOSPC, "full", "cannot write 1048576 bytes at offset 0: No space left on device");
  // Later calls fail too, and all buffers are back in the pool.
  expect_errno([&] { file->sync(kNever); }, ENOSPC, "full", "No space left");
  expect_errno([&] { file->close(); }, ENOSPC, "full", "No space left");
  EXPECT_EQ(disk.system->syncs, 0);
  for (size_t i = 0; i < pool->buffers(); ++i) EXPECT_TRUE(pool->try_acquire());
}

TEST(PosixStorage, ADiskThatFillsUpInTheMiddleOfAFileIsToldAtTheRightOffset) {
  for (const Cache cache : {Cache::kDirect, Cache::kBuffered}) {
    Failing disk({Calls::kPlain, cache, Cache::kAuto, 2});
    disk.system->room = 2 * kMiB + 8192;
    const auto pool = BufferPool::create(4 * kMiB, kMiB);
    const auto file = disk.storage->create("full");
    expect_errno(
        [&] {
          append_buffers(*file, *pool, 3, kMiB);
          file->sync(kNever);
        },
        ENOSPC, "full", "cannot write 1040384 bytes at offset 2105344");
  }
}

TEST(PosixStorage, AFullDiskIsFoundOutBeforeALargeFileIsWritten) {
  Failing disk({Calls::kPlain, Cache::kAuto, Cache::kAuto, 2});
  disk.system->reserve_error = ENOSPC;
  const auto pool = BufferPool::create(2 * kMiB, kMiB);
  const auto file = disk.storage->create("f", 100 * kMiB);
  expect_errno([&] { append_buffers(*file, *pool, 1, kMiB); }, ENOSPC, "f",
               "cannot reserve 104857600 bytes");
}

TEST(PosixStorage, RoomThatWasReservedTooMuchIsGivenBack) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path());
  const auto pool = BufferPool::create(2 * kMiB, kMiB);
  const auto file = storage->create("f", 64 * kMiB);
  append_buffers(*file, *pool, 2, kMiB);
  file->sync(kNever);
  struct stat info;
  ASSERT_EQ(::stat((directory.path() + "/f").c_str(), &info), 0);
  EXPECT_EQ(info.st_size, static_cast<off_t>(2 * kMiB));
  EXPECT_LE(info.st_blocks * 512, static_cast<off_t>(3 * kMiB));
}

// Memory that begins `phase` bytes after a multiple of the alignment.
struct Placed {
  Placed(size_t size, size_t phase) : owner(size + 2 * BufferPool::kAlignment) {
    const auto address = reinterpret_cast<uintptr_t>(owner.data());
    const size_t up = (BufferPool::kAlignment - address % BufferPool::kAlignment + phase);
    view = MutableByteView(owner).subspan(up, size);
  }
  Bytes owner;
  MutableByteView view;
};

// A file system would run direct writes that lengthen a file one after the other.
TEST(PosixStorage, NoDirectWriteLengthensAFileThatHasRoomReserved) {
  Failing disk({Calls::kPlain, Cache::kDirect, Cache::kAuto, 2});
  disk.system->reserve_error = 0;
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const Bytes bytes = pattern_bytes(3 * kMiB);
  Placed kept(2 * kMiB, 0);
  std::copy_n(bytes.begin(), 2 * kMiB, kept.view.begin());
  const auto file = disk.storage->create("f", 4 * kMiB);  // less than is appended
  append_buffers(*file, *pool, 40, kMiB);
  file->append_kept(kept.view);
  EXPECT_EQ(disk.system->writes_lengthening, 0);
  file->close();
  EXPECT_GT(disk.system->direct_writes, 0);
  EXPECT_EQ(disk.system->writes_lengthening, 0);
  EXPECT_EQ(disk.storage->stat("f")->size, 42 * kMiB);  // close truncates it without a sync
}

TEST(PosixStorage, WhatAReservationThatFailedHasLengthenedIsCut) {
  Failing disk({Calls::kPlain, Cache::kDirect, Cache::kAuto, 2});
  disk.system->reserve_error = 0;
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const auto file = disk.storage->create("f", 2 * kMiB);
  append_buffers(*file, *pool, 2, kMiB);
  disk.system->no_more_room = true;
  append_buffers(*file, *pool, 3, kMiB);
  file->sync(kNever);
  EXPECT_EQ(disk.storage->stat("f")->size, 5 * kMiB);
}

TEST(PosixStorage, AfterAShortDirectWriteTheNextOneIsAligned) {
  Failing disk({Calls::kPlain, Cache::kDirect, Cache::kAuto, 2});
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  disk.system->most_written = 3 * kMiB / 10;  // in the middle of a page
  const auto file = disk.storage->create("f", 3 * kMiB);
  append_buffers(*file, *pool, 3, kMiB);
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

TEST(PosixStorage, KeptMemoryIsWrittenDirectlyWhereItIsAligned) {
  Failing disk({Calls::kPlain, Cache::kDirect, Cache::kAuto, 2});
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  const Bytes bytes = pattern_bytes(3 * kMiB);
  Placed kept(2 * kMiB, 0);
  std::copy_n(bytes.begin(), 2 * kMiB, kept.view.begin());
  const auto file = disk.storage->create("f", 3 * kMiB);
  file->append_kept(kept.view);
  EXPECT_EQ(file->size(), 2 * kMiB);
  file->append(ByteView(bytes).subspan(2 * kMiB));
  file->sync(kNever);
  EXPECT_EQ(disk.system->direct_writes, 1);
  EXPECT_TRUE(same_bytes(read_file(*disk.storage, "f", 4 * kMiB), bytes));
}

TEST(PosixStorage, AFailedWriteOfKeptMemoryIsTold) {
  Failing disk({Calls::kPlain, Cache::kDirect, Cache::kAuto, 2});
  disk.system->room = kMiB;
  Placed kept(2 * kMiB, 0);
  const auto file = disk.storage->create("f");
  expect_errno(
      [&] {
        file->append_kept(kept.view);
        file->sync(kNever);
      },
      ENOSPC, "f", "cannot write 1048576 bytes at offset 1048576");
}

TEST(PosixStorage, LargeReadsGoStraightWhereFileAndMemoryAreAlignedAlike) {
  const uint64_t size = 20 * kMiB;
  const Bytes bytes = pattern_bytes(size);
  const TempDirectory directory;
  const auto storage =
      posix_storage(directory.path(), {Calls::kAuto, Cache::kAuto, Cache::kDirect});
  put_file(*storage, "f", bytes);
  const auto file = storage->open("f");
  const auto pool = BufferPool::create(4 * kMiB, kMiB);
  for (const uint64_t offset : {0, 64, 4032}) {
    for (const size_t phase : {0, 64, 100, 4032}) {
      for (const uint64_t rest : {0, 1, 4096, 5000}) {
        SCOPED_TRACE(std::to_string(offset) + " " + std::to_string(phase) + " " +
                     std::to_string(rest));
        Placed target(size - offset - rest, phase);
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

// Returns whether the page cache holds the ranges that were prefetched.
bool prefetches_into_the_page_cache(Failing& disk) {
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
  EXPECT_TRUE(storage.can(StorageCapability::kSharedCache));
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

TEST(PosixStorage, WhatIsPrefetchedIsReadFromThePageCache) {
  EXPECT_TRUE(in_some_trial([] {
    Failing disk;
    return prefetches_into_the_page_cache(disk);
  }));
}

TEST(PosixStorage, PrefetchingReadsWhereTheKernelCannotPopulate) {
  EXPECT_TRUE(in_some_trial([] {
    Failing disk;
    disk.system->will_need_missing = true;
    disk.system->populate_missing = true;
    return prefetches_into_the_page_cache(disk);
  }));
}

TEST(PosixStorage, PrefetchingMorePiecesThanAreUnderWayAtOnceBringsInAll) {
  for (const bool missing : {false, true}) {
    EXPECT_TRUE(in_some_trial([&] {
      Failing disk;
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

TEST(PosixStorage, APrefetchThatCannotReadNamesTheFile) {
  Failing disk;
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

// File systems over object stores fail if a write does not continue at the end (VeOmni 801).
TEST(PosixStorage, FilesOfFuseAreWrittenInOrder) {
  Failing disk;
  disk.system->fuse = true;
  disk.system->reserve_error = 0;
  const auto pool = BufferPool::create(8 * kMiB, kMiB);
  const Bytes kept = pattern_bytes(4 * kMiB);
  const auto file = disk.storage->create("f", 32 * kMiB);
  append_buffers(*file, *pool, 5, kMiB);
  file->append_kept(kept);
  file->append(as_bytes("tail"));
  append_buffers(*file, *pool, 3, kMiB - 5);
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

TEST(PosixStorage, AFailedSyncIsNeverTriedAgain) {
  Failing disk;
  disk.system->sync_error = EIO;
  const auto file = disk.storage->create("f");
  file->append(as_bytes("abc"));
  expect_errno([&] { file->sync(kNever); }, EIO, "f", "cannot sync a file: Input/output error");
  disk.system->sync_error = 0;  // a second sync would succeed although data is lost
  expect_errno([&] { file->sync(kNever); }, EIO, "f", "cannot sync a file");
  EXPECT_EQ(disk.system->syncs, 1);
}

TEST(PosixStorage, AFailedCloseOrDirectorySyncIsAnError) {
  Failing disk;
  disk.system->close_error = EIO;
  const auto file = disk.storage->create("f");
  expect_errno([&] { file->close(); }, EIO, "f", "cannot close a file");
  disk.system->sync_error = EDQUOT;
  expect_errno([&] { disk.storage->sync_directory(""); }, EDQUOT, disk.directory.path(),
               "cannot sync a directory");
}

TEST(PosixStorage, AReadErrorNamesRangeAndFileAndEndsTheBatch) {
  Failing disk({Calls::kPlain, Cache::kAuto, Cache::kBuffered, 2});
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
  for (const Cache cache : {Cache::kDirect, Cache::kBuffered}) {
    const TempDirectory directory;
    const auto storage = posix_storage(directory.path(), {.read_cache = cache});
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

TEST(PosixStorage, WritesThatTheFileSystemRefusesToDoDirectlyGoThroughThePageCache) {
  Failing disk({Calls::kPlain, Cache::kDirect, Cache::kAuto, 4});
  disk.system->direct_write_error = EINVAL;
  const auto pool = BufferPool::create(8 * kMiB, kMiB);
  const auto file = disk.storage->create("f");
  append_buffers(*file, *pool, 12, kMiB);
  file->sync(kNever);
  file->close();
  const Bytes bytes = read_file(*disk.storage, "f", 12 * kMiB);
  ASSERT_EQ(bytes.size(), 12 * kMiB);
  for (size_t i = 0; i < bytes.size(); i += 4096) {
    ASSERT_EQ(bytes[i], static_cast<std::byte>(i / kMiB + 1));
  }
}

TEST(PosixStorage, LargeFilesAreWrittenDirectlyAndSmallOnesThroughThePageCache) {
  Failing disk({Calls::kPlain, Cache::kAuto, Cache::kAuto, 4});
  const auto pool = BufferPool::create(8 * kMiB, kMiB);
  put_file(*disk.storage, "small", pattern_bytes(10'000));
  EXPECT_EQ(disk.system->direct_writes, 0);
  const auto file = disk.storage->create("large", 4 * kMiB);
  append_buffers(*file, *pool, 4, kMiB);
  file->sync(kNever);
  EXPECT_EQ(disk.system->direct_writes, 4);
}

TEST(PosixStorage, IoUringAskedForByNameMustBeThere) {
  const TempDirectory directory;
  expect_error(
      [&] {
        posix_storage(directory.path(), {.calls = Calls::kUring},
                      std::make_shared<FailingSystem>());
      },
      ErrorCode::kUnsupported, "io_uring");
}

TEST(PosixStorage, ManyFilesShareAPoolSmallerThanTheirQueues) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path(), {.write_cache = Cache::kDirect});
  const auto pool = BufferPool::create(3 * kMiB, kMiB);
  ThreadPool threads(4);
  threads.parallel_for(6, [&](size_t i) {
    const auto file = storage->create("f" + std::to_string(i));
    append_buffers(*file, *pool, 10, kMiB);
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
  expect_error([&] { storage->create("f"); }, ErrorCode::kNotFound, "f");
  storage->make_directory("");
  put_file(*storage, "f", as_bytes("abc"));
  EXPECT_TRUE(fs::exists(directory.path() + "/a/b/c/f"));
}

TEST(PosixStorage, ADirectoryRemovedUnderWayIsNotFound) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path() + "/root");
  storage->make_directory("sub");
  fs::remove_all(directory.path() + "/root");
  expect_error([&] { storage->create("sub/f"); }, ErrorCode::kNotFound, "sub/f");
  expect_error([&] { storage->sync_directory("sub"); }, ErrorCode::kNotFound, "sub");
}

TEST(PosixStorage, TwoStoragesOfOneDirectoryShareTheirLocks) {
  const TempDirectory directory;
  const auto one = posix_storage(directory.path()), two = posix_storage(directory.path());
  auto lock = one->try_lock("lock");
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(two->try_lock("lock"), nullptr);
  lock.reset();
  EXPECT_NE(two->try_lock("lock"), nullptr);
}

// If the test may not mount, it uses /dev/full as the full disk, which returns the kernel's ENOSPC.
TEST(PosixStorage, ARealFullDiskIsToldAndOldFilesStay) {
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
  for (const Cache cache : {Cache::kAuto, Cache::kDirect, Cache::kBuffered}) {
    const auto storage = posix_storage(disk.path(), {.write_cache = cache});
    if (!storage->stat("old")) put_file(*storage, "old", as_bytes("old"));
    for (const uint64_t expected : {uint64_t{0}, uint64_t{8 * kMiB}}) {
      const auto file = storage->create("big", expected);
      try {
        append_buffers(*file, *pool, 8, kMiB);
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
  expect_errno([&] { storage->make_directory("d"); }, error, "d", "cannot make a directory");
  expect_errno([&] { storage->rename("f", "g", false); }, error, "f", "cannot rename");
}

}  // namespace tilestone::posix_storage_test
