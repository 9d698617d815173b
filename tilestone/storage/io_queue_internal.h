// A queue of reads and writes for one thread, several of which are in progress at a time. It uses
// io_uring, or helper threads: if the kernel does not allow io_uring, and to populate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tilestone {

class System;

struct IoRequest {
  // kPopulate: System::populate_large_folios(); only a queue over threads can do it.
  enum class Kind : uint8_t { kRead, kWrite, kPopulate };
  Kind kind = Kind::kRead;
  int fd = -1;
  std::byte* data = nullptr;  // must stay valid until wait() has returned the result; not kPopulate
  size_t size = 0;            // bytes, 1 to kMaxRequest
  uint64_t offset = 0;        // in the file
  uint64_t tag = 0;           // returned with the result
};

struct IoResult {
  uint64_t tag = 0;
  int64_t result = 0;  // bytes, possibly fewer than requested (kPopulate: 0); or -errno
};

// Only one thread at a time may use a queue. Wait for all requests before destroying it.
class IoQueue {
 public:
  static constexpr size_t kMaxRequest = size_t{1} << 30;  // bytes

  virtual ~IoQueue() = default;
  // Starts a request. At most `depth` requests may be in progress. Does not block for long.
  virtual void submit(const IoRequest& request) = 0;
  // Waits for a result; results come in any order. At least one request must be in progress.
  virtual IoResult wait() = 0;
};

// A queue over io_uring. If the kernel refuses, returns null and sets `error` to its errno.
std::unique_ptr<IoQueue> make_uring_queue(unsigned depth, int& error);

// A queue over at most four threads, which call `system`'s functions. `system` must outlive the
// queue. Its destruction drops requests that have not begun, and waits for the others.
// std::system_error if no thread can be started.
std::unique_ptr<IoQueue> make_thread_queue(System& system, unsigned depth);

}  // namespace tilestone
