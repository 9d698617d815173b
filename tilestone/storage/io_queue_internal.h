// Reads and writes of one thread, several under way at a time: by io_uring, or by helper threads
// where the kernel does not let us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tilestone {

class System;

struct IoRequest {
  enum class Kind : uint8_t { kRead, kWrite };
  Kind kind = Kind::kRead;
  int fd = -1;
  std::byte* data = nullptr;  // must live until the request's result was waited for
  size_t size = 0;            // bytes, 1 to kMaxRequest
  uint64_t offset = 0;        // in the file
  uint64_t tag = 0;           // comes back with the result
};

struct IoResult {
  uint64_t tag = 0;
  int64_t result = 0;  // bytes, possibly fewer than asked for; or -errno
};

// Used by one thread at a time. Must not be destroyed with requests under way: wait for all first.
class IoQueue {
 public:
  static constexpr size_t kMaxRequest = size_t{1} << 30;  // bytes

  virtual ~IoQueue() = default;
  // At most `depth` requests may be under way. Does not block for long.
  virtual void submit(const IoRequest& request) = 0;
  // The next result, in any order; at least one request must be under way.
  virtual IoResult wait() = 0;
};

// Null where the kernel refuses; `error` is then its errno.
std::unique_ptr<IoQueue> make_uring_queue(unsigned depth, int& error);

// At most four threads that call system.pread and system.pwrite.
std::unique_ptr<IoQueue> make_thread_queue(System& system, unsigned depth);

}  // namespace tilestone
