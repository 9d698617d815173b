// Threads and buffers that are kept from one save to the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/run/resources_internal.h"

namespace tilestone::engine {

// Keeps the last pool of each kind, and returns it again when the same kind is requested.
// Thread-safe. A returned pool may outlive this object.
class KeptResources {
 public:
  // As make_pool().
  std::shared_ptr<BufferPool> buffers(uint64_t total, size_t streams, uint64_t work) {
    return kept(buffers_, make_pool(total, streams, work));  // takes no memory yet
  }

  // As make_pinned_pool().
  std::shared_ptr<BufferPool> pinned_buffers(uint64_t total, size_t streams, size_t per_stream,
                                             uint64_t work, const DeviceMemory& device) {
    return kept(pinned_, make_pinned_pool(total, streams, per_stream, work, device));
  }

  // A pool of `count` >= 1 threads.
  std::shared_ptr<ThreadPool> threads(size_t count) {
    const std::lock_guard lock(mutex_);
    if (threads_ == nullptr || threads_->size() != count) {
      threads_ = std::make_shared<ThreadPool>(count);
    }
    return threads_;
  }

 private:
  std::shared_ptr<BufferPool> kept(std::shared_ptr<BufferPool>& last,
                                   std::shared_ptr<BufferPool> fresh) {
    const std::lock_guard lock(mutex_);
    const bool same = last != nullptr && last->buffer_bytes() == fresh->buffer_bytes() &&
                      last->buffers() == fresh->buffers();
    if (!same) last = std::move(fresh);
    return last;
  }

  std::mutex mutex_;
  std::shared_ptr<BufferPool> buffers_;
  std::shared_ptr<BufferPool> pinned_;
  std::shared_ptr<ThreadPool> threads_;
};

}  // namespace tilestone::engine
