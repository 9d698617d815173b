// The system calls of the POSIX storage, as an object, so that a test can make any of them fail or
// do less than requested. Unless stated otherwise a function returns -1 and sets errno on failure,
// and never retries.
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
  // preadv2 with RWF_NOWAIT: reads only bytes that are in the page cache. EAGAIN if there are none.
  virtual ssize_t read_cached(int fd, void* data, size_t size, uint64_t offset);
  virtual ssize_t pwrite(int fd, const void* data, size_t size, uint64_t offset);
  virtual int fsync(int fd);
  virtual int ftruncate(int fd, uint64_t size);
  virtual int close(int fd);
  // fallocate of the first `size` bytes. A shorter file gets the length `size`.
  virtual int reserve(int fd, uint64_t size);
  // Turns O_DIRECT of an open file on or off.
  virtual int set_direct(int fd, bool direct);
  // Whether the file is on a FUSE file system.
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
  // Sets `bytes` to the number of bytes in the page cache, in whole pages, of the pages that
  // [offset, offset + size) touches.
  virtual int cached_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes);
  // The same through a mapping, which is slower.
  virtual int resident_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes);
  // Asks the kernel to read the pages of [offset, offset + size) into the page cache. Does not
  // wait.
  virtual void will_need(int fd, uint64_t offset, uint64_t size);
  // Reads the pages of [offset, offset + size) that are missing into the page cache, and waits for
  // them.
  virtual int populate(int fd, uint64_t offset, uint64_t size);
  // The same with the largest folios that the kernel supports (2 MiB on x86), from which later
  // reads copy faster. It reads whole folios, and later reads of them make the kernel read ahead.
  virtual int populate_large_folios(int fd, uint64_t offset, uint64_t size);
  // Calls make_uring_queue.
  virtual std::unique_ptr<IoQueue> uring_queue(unsigned depth, int& error);
};

// Throws an Error with the message "what", the errno and the file's name. ENOENT becomes kNotFound,
// EEXIST kAlreadyExists, EXDEV and ELOOP (a link leaves the root or is part of a loop) kUnsafe, and
// all others kIo.
[[noreturn]] void fail_errno(const std::string& what, const std::string& name, int error);

}  // namespace tilestone
