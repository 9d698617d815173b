#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/storage/system_internal.h"

namespace tilestone {
namespace {

// cachestat: Linux 6.5, which older headers do not define. The number is the same on all
// architectures.
constexpr long kCachestat = 451;
struct CachestatRange {
  uint64_t offset;
  uint64_t size;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ: Linux 5.14, not defined by older headers

uint64_t page_size() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

ssize_t System::pread(int fd, void* data, size_t size, uint64_t offset) {
  return ::pread(fd, data, size, static_cast<off_t>(offset));
}

ssize_t System::read_cached(int fd, void* data, size_t size, uint64_t offset) {
  const iovec range{data, size};
  return ::preadv2(fd, &range, 1, static_cast<off_t>(offset), RWF_NOWAIT);
}

ssize_t System::pwrite(int fd, const void* data, size_t size, uint64_t offset) {
  return ::pwrite(fd, data, size, static_cast<off_t>(offset));
}

int System::fsync(int fd) { return ::fsync(fd); }

int System::ftruncate(int fd, uint64_t size) { return ::ftruncate(fd, static_cast<off_t>(size)); }

int System::close(int fd) { return ::close(fd); }

int System::reserve(int fd, uint64_t size) {
  return ::fallocate(fd, 0, 0, static_cast<off_t>(size));
}

bool System::is_fuse(int fd) {
  struct statfs info;
  return ::fstatfs(fd, &info) == 0 && info.f_type == FUSE_SUPER_MAGIC;
}

int System::set_direct(int fd, bool direct) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0) return -1;
  return fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT);
}

int System::open_beneath(int directory, const char* name, int flags, unsigned mode) {
  open_how how{};
  how.flags = static_cast<uint64_t>(flags | O_CLOEXEC);
  how.mode = (flags & O_CREAT) != 0 ? mode : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  return static_cast<int>(syscall(SYS_openat2, directory, name, &how, sizeof how));
}

int System::rename_exclusive(int from_directory, const char* from, int to_directory,
                             const char* to) {
  return ::renameat2(from_directory, from, to_directory, to, RENAME_NOREPLACE);
}

int System::rename_exchange(int a_directory, const char* a, int b_directory, const char* b) {
  return ::renameat2(a_directory, a, b_directory, b, RENAME_EXCHANGE);
}

int System::lock(int fd) {
  struct flock whole_file{};
  whole_file.l_type = F_WRLCK;
  whole_file.l_whence = SEEK_SET;
  return ::fcntl(fd, F_OFD_SETLK, &whole_file);
}

int System::cached_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes) {
  const CachestatRange range{offset, size};
  Cachestat counts{};
  if (syscall(kCachestat, fd, &range, &counts, 0) == 0) {
    bytes = counts.cached * page_size();
    return 0;
  }
  return resident_bytes(fd, offset, size, bytes);  // before Linux 6.5
}

int System::resident_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes) {
  const uint64_t page = page_size();
  const uint64_t begin = offset / page * page;
  const uint64_t length = offset + size - begin;
  void* map = mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (map == MAP_FAILED) return -1;
  std::vector<unsigned char> resident((length + page - 1) / page);
  const int result = mincore(map, length, resident.data());
  bytes = 0;
  for (const unsigned char state : resident) bytes += (state & 1u) * page;
  munmap(map, length);
  return result;
}

// Asks in steps, because the kernel ignores the part of a request that exceeds the device's usual
// request size.
void System::will_need(int fd, uint64_t offset, uint64_t size) {
  constexpr uint64_t kStep = 512u << 10;  // bytes
  for (uint64_t done = 0; done < size; done += kStep) {
    ::posix_fadvise(fd, static_cast<off_t>(offset + done),
                    static_cast<off_t>(std::min(size - done, kStep)), POSIX_FADV_WILLNEED);
  }
}

namespace {

// Reads the range into the page cache through a temporary mapping. No byte is copied, and a page
// that can't be read gives an error instead of a signal.
int populate_mapped(int fd, uint64_t offset, uint64_t size, bool large_folios) {
  const uint64_t begin = offset / page_size() * page_size();
  const uint64_t length = offset + size - begin;
  void* map = mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (map == MAP_FAILED) return -1;
  if (large_folios) {
    madvise(map, length, MADV_HUGEPAGE);  // fails on kernels without huge pages
    madvise(map, length, MADV_RANDOM);    // or the kernel reads the same number of bytes ahead
  }
  const int result = madvise(map, length, kPopulateRead);
  munmap(map, length);
  return result;
}

}  // namespace

int System::populate(int fd, uint64_t offset, uint64_t size) {
  return populate_mapped(fd, offset, size, false);
}

int System::populate_large_folios(int fd, uint64_t offset, uint64_t size) {
  return populate_mapped(fd, offset, size, true);
}

std::unique_ptr<IoQueue> System::uring_queue(unsigned depth, int& error) {
  return make_uring_queue(depth, error);
}

void fail_errno(const std::string& what, const std::string& name, int error) {
  ErrorCode code = ErrorCode::kIo;
  std::string message = what;  // with_errno appends the reason
  if (error == ENOENT) code = ErrorCode::kNotFound;
  if (error == EEXIST) code = ErrorCode::kAlreadyExists;
  if (error == EXDEV || error == ELOOP) {
    code = ErrorCode::kUnsafe;
    message = what + ": a symbolic link leaves the storage's root or is part of a loop";
  }
  Error failure(code, std::move(message));
  if (error == EMFILE) {
    failure.with_hint("this process may have at most " + std::to_string(max_open_files()) +
                      " open files: raise the limit (ulimit -n), or close some");
  }
  throw failure.with_file(name).with_errno(error);
}

}  // namespace tilestone
