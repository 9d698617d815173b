// For tests of the POSIX storage: a system whose calls fail as a test asks for.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone {

// The real system, with or without io_uring, on which nothing is in the page cache: what may be
// read directly is.
class ColdSystem : public System {
 public:
  explicit ColdSystem(bool uring) : uring_(uring) {}
  ssize_t read_cached(int, void*, size_t, uint64_t) override {
    errno = EAGAIN;
    return -1;
  }
  int cached_bytes(int, uint64_t, uint64_t, uint64_t& bytes) override {
    bytes = 0;
    return 0;
  }
  int resident_bytes(int, uint64_t, uint64_t, uint64_t& bytes) override {
    bytes = 0;
    return 0;
  }
  std::unique_ptr<IoQueue> uring_queue(unsigned depth, int& error) override {
    if (uring_) return System::uring_queue(depth, error);
    error = EPERM;
    return nullptr;
  }

 private:
  const bool uring_;
};

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

// A storage in a directory of its own, over such a system.
struct FailingDisk {
  explicit FailingDisk(PosixOptions options = {})
      : system(std::make_shared<FailingSystem>()),
        storage(posix_storage(directory.path(), options, system)) {}
  TempDirectory directory;
  std::shared_ptr<FailingSystem> system;
  std::shared_ptr<Storage> storage;
};

// Memory that begins `phase` bytes after a multiple of the alignment.
struct PhasedMemory {
  PhasedMemory(size_t size, size_t phase) : owner(size + 2 * BufferPool::kAlignment) {
    const auto address = reinterpret_cast<uintptr_t>(owner.data());
    const size_t up = (BufferPool::kAlignment - address % BufferPool::kAlignment + phase);
    view = MutableByteView(owner).subspan(up, size);
  }
  Bytes owner;
  MutableByteView view;
};

// While it exists, this process can have 128 files open, and open `left` more.
class FilesLeft {
 public:
  explicit FilesLeft(int left) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few{128, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &few);
    while (UniqueFd fd{::open("/dev/null", O_RDONLY | O_CLOEXEC)}) taken_.push_back(std::move(fd));
    for (; left > 0; --left) taken_.pop_back();
  }
  ~FilesLeft() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FilesLeft(const FilesLeft&) = delete;
  FilesLeft& operator=(const FilesLeft&) = delete;

 private:
  rlimit before_{};
  std::vector<UniqueFd> taken_;
};

// Appends `count` buffers of `size` bytes of the value 1, 2, ...
void append_numbered(WritableFile& file, BufferPool& pool, size_t count, size_t size);

// Runs `call`, which must fail with this errno and the path of this file, and with a message that
// contains `text`.
void expect_errno(const std::function<void()>& call, int error, const std::string& name,
                  const std::string& text);

}  // namespace tilestone
