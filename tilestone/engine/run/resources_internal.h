// The threads and buffers of a save, a load or an open checkpoint.
#pragma once

#include <algorithm>
#include <memory>
#include <thread>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/checked.h"
#include "tilestone/base/host.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone::engine {

// The number of threads for the option `threads`. 0: as many as the machine has, at most 8.
inline size_t thread_count(int option) {
  if (option > 0) return static_cast<size_t>(option);
  return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 8);
}

// How many of `wanted` files a call may have open at the same time: an eighth of what the process
// may open, because other calls, threads and the program open files too.
inline size_t files_at_once(size_t wanted) {
  return static_cast<size_t>(
      std::clamp<uint64_t>(max_open_files() / 8, 1, std::max<size_t>(wanted, 1)));
}

// A pool of `total` bytes for `streams` concurrent files or threads, which move `work` bytes in
// all. A storage has up to 8 of a stream's buffers (its queue depth) in flight while the stream
// fills the next one, so each stream gets 16. The buffers are smaller where the memory does not
// suffice for that, and where the work is small, because touching fresh memory is expensive.
inline std::shared_ptr<BufferPool> make_pool(uint64_t total, size_t streams, uint64_t work) {
  constexpr uint64_t kPerStream = 16;
  constexpr uint64_t kSmallest = 64u << 10;
  const uint64_t many = std::max<size_t>(streams, 1);
  const uint64_t share = total / (kPerStream * many) & ~(kSmallest - 1);
  const uint64_t needed = align_up(work / many + 1, kSmallest);
  const uint64_t buffer =
      std::clamp<uint64_t>(std::min(share, needed), kSmallest, BufferPool::kDefaultBuffer);
  return BufferPool::create(std::max(total, buffer), buffer);
}

// A pool with at least `per_stream` buffers for each of `streams`, through which `work` bytes come
// from or go to devices of the kind of `device`. It is pinned unless `work` is small.
inline std::shared_ptr<BufferPool> make_pinned_pool(uint64_t total, size_t streams,
                                                    size_t per_stream, uint64_t work,
                                                    const DeviceMemory& device) {
  constexpr uint64_t kSmallest = 64u << 10;
  constexpr uint64_t kPinnedFrom = 1u << 20;  // for fewer bytes, pinning takes longer than it saves
  const uint64_t many = std::max<size_t>(streams, 1);
  const uint64_t share = total / (per_stream * many) & ~(kSmallest - 1);
  const uint64_t needed = align_up(std::min(work, total) / many + 1, kSmallest);
  const uint64_t buffer =
      std::clamp<uint64_t>(std::min(share, needed), kSmallest, BufferPool::kDefaultBuffer);
  return BufferPool::create(buffer * per_stream * many, buffer,
                            work < kPinnedFrom ? PinHost() : device.pin());
}

}  // namespace tilestone::engine
