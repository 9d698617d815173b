// The direct writes of one file that are under way.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/storage/posix_internal.h"

namespace tilestone {

// Writes all bytes at the offset of the file, however many calls that takes.
void write_at(System& system, int fd, const std::string& path, ByteView bytes, uint64_t offset);

// A thread waits for results, so that each buffer goes back to its pool when it is written,
// whatever the file's user does meanwhile: a pool may be smaller than the queue is deep, and
// several files may share it. Used by one thread.
class DirectWrites {
 public:
  // fd, open with O_DIRECT, must outlive the object.
  DirectWrites(std::shared_ptr<PosixContext> context, std::string path, int fd);
  // Waits for what is under way, whatever becomes of it.
  ~DirectWrites();

  // Writes the first `size` bytes (a multiple of the alignment) of the buffer at `offset` of the
  // file; waits while queue_depth writes are under way. Throws what an earlier write failed with.
  void start(Buffer buffer, uint64_t offset, uint64_t size);
  // The same for aligned memory that outlives the write.
  void start(ByteView kept, uint64_t offset);
  // Waits for all writes; throws what one of them failed with.
  void finish();

 private:
  struct WriteSlot {
    Buffer buffer;                    // none for kept memory
    const std::byte* data = nullptr;  // null: a free slot
    uint64_t offset = 0;              // in the file
    uint64_t size = 0;                // bytes to write
    uint64_t done = 0;                // bytes written
  };

  void start(WriteSlot slot);
  void reap();  // the thread
  void submit(size_t index);
  void handle(const IoResult& result);
  void finished(const WriteSlot& slot, int error);

  std::shared_ptr<PosixContext> context_;
  std::string path_;  // of the file, for errors
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
