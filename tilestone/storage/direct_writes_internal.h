// The direct writes in progress of one file.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/storage/posix_internal.h"

namespace tilestone {

// Writes all bytes at `offset` of the file, with as many calls as that takes. Throws Error(kIo).
void write_at(System& system, int fd, const std::string& path, ByteView bytes, uint64_t offset);

// Writes buffers by direct I/O, several at a time. An internal thread waits for the results, so
// each buffer returns to its pool as soon as it is written, whatever the caller does meanwhile.
// This matters because several files may share a pool, and a pool may have fewer buffers than the
// queue depth. Only one thread may use the object.
class DirectWrites {
 public:
  // fd, open with O_DIRECT, must outlive the object.
  DirectWrites(std::shared_ptr<PosixContext> context, std::string path, int fd);
  // Waits for the writes in progress and ignores their failures.
  ~DirectWrites();

  // Starts to write the first `size` bytes of the buffer at `offset` of the file; both are
  // multiples of kAlignment. Waits while queue_depth writes are in progress. Throws the failure of
  // an earlier write.
  void start(Buffer buffer, uint64_t offset, uint64_t size);
  // The same for aligned memory. The caller must keep it unchanged until finish() has returned or
  // the object is destroyed.
  void start(ByteView kept, uint64_t offset);
  // Waits for all writes. Throws the first failure.
  void finish();

 private:
  struct WriteSlot {
    Buffer buffer;                    // empty for memory that the caller keeps
    const std::byte* data = nullptr;  // null: a free slot
    uint64_t offset = 0;              // in the file
    uint64_t size = 0;                // bytes to write
    uint64_t done = 0;                // bytes written
  };

  void start(WriteSlot slot);
  void reap();  // runs on the internal thread
  void submit(size_t index);
  void handle(const IoResult& result);
  void finished(const WriteSlot& slot, int error);

  std::shared_ptr<PosixContext> context_;
  std::string path_;  // for error messages
  int fd_;
  std::unique_ptr<IoQueue> queue_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<WriteSlot> slots_;
  size_t under_way_ = 0;
  bool stop_ = false;
  std::exception_ptr failure_;
  std::thread reaper_;
};

}  // namespace tilestone
