// The system calls that the POSIX storage makes, as an object, so that a test can make any of them
// fail, or do less than it was asked for. Each does what the system call of its name does: -1 and
// errno on failure, no retry.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tilestone/storage/io_queue_internal.h"

namespace tilestone {

class System {
 public:
  virtual ~System() = default;

  virtual ssize_t pread(int fd, void* data, size_t size, uint64_t offset);
  // preadv2 with RWF_NOWAIT: only what is in the page cache; EAGAIN where that is nothing.
  virtual ssize_t read_cached(int fd, void* data, size_t size, uint64_t offset);
  virtual ssize_t pwrite(int fd, const void* data, size_t size, uint64_t offset);
  virtual int fsync(int fd);
  virtual int ftruncate(int fd, uint64_t size);
  virtual int close(int fd);
  // fallocate of the first `size` bytes, which become the file's length if it is shorter.
  virtual int reserve(int fd, uint64_t size);
  // Turns O_DIRECT of an open file on or off.
  virtual int set_direct(int fd, bool direct);
  // Whether the file's system is a process of its own (FUSE).
  virtual bool is_fuse(int fd);
  // openat2 with RESOLVE_BENEATH.
  virtual int open_beneath(int directory, const char* name, int flags, unsigned mode);
  // renameat2 with RENAME_NOREPLACE.
  virtual int rename_exclusive(int from_directory, const char* from, int to_directory,
                               const char* to);
  // renameat2 with RENAME_EXCHANGE.
  virtual int rename_exchange(int a_directory, const char* a, int b_directory, const char* b);
  // fcntl with F_OFD_SETLK: locks the whole file for writing, without waiting.
  virtual int lock(int fd);
  // How many bytes of the pages of [offset, offset + size) are in the page cache.
  virtual int cached_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes);
  // The same by way of a mapping, which is slower.
  virtual int resident_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes);
  // Asks for the pages of [offset, offset + size) to be read into the page cache, without waiting.
  virtual void will_need(int fd, uint64_t offset, uint64_t size);
  // Returns once they are there; reads what is not.
  virtual int populate(int fd, uint64_t offset, uint64_t size);
  // The same in folios as large as the kernel has them (2 MiB on x86), from which later reads copy
  // faster. Whole folios are read, and reading them later makes the kernel read ahead.
  virtual int populate_large_folios(int fd, uint64_t offset, uint64_t size);
  // As make_uring_queue.
  virtual std::unique_ptr<IoQueue> uring_queue(unsigned depth, int& error);
};

// "what: No such file or directory" as an Error with the errno and the file's name. ENOENT becomes
// kNotFound, EEXIST kAlreadyExists, ways out of the root kUnsafe, all others kIo.
[[noreturn]] void fail_errno(const std::string& what, const std::string& name, int error);

}  // namespace tilestone
