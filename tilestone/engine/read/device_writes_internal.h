// Writes what a load has read to tensors in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone::engine {

// Each thread gathers bytes in a block of pinned host memory. A full block is submitted as one
// batch of copies. The device copies it while the thread fills another one. Batches are waited for
// when there are many, and at the end. Thread-safe.
class DeviceWrites {
 public:
  // At most about that many bytes will be written. The first call before the first write counts;
  // without it, blocks are large.
  void expect(uint64_t bytes);
  // The most bytes of one write.
  uint64_t block_bytes(const DeviceMemory& device);
  // Calls fill() with `bytes` of host memory, aligned for every type of element, and writes what it
  // has put there to the bytes of `memory` from `begin` on. Between two writes to the same bytes
  // finish() must be called.
  void write(const std::shared_ptr<DeviceMemory>& memory, uint64_t begin, uint64_t bytes,
             const std::function<void(std::byte*)>& fill);
  // Returns when everything has been written. Nothing else may be written meanwhile.
  void finish();

 private:
  static constexpr size_t kInFlight = 4;  // batches
  struct Block {
    Buffer buffer;
    std::vector<DeviceCopy> copies;
    DeviceBatch batch;  // the last member: it is destroyed, and so waited for, first
  };

  BufferPool& buffers(const DeviceMemory& device);
  Block& with_room(uint64_t bytes, const DeviceMemory& device);
  void submit(std::unique_ptr<Block> block);
  std::unique_ptr<Block> wait_for_first();

  std::mutex mutex_;
  std::optional<uint64_t> expected_;  // bytes
  std::shared_ptr<BufferPool> buffers_;
  std::map<std::thread::id, std::unique_ptr<Block>> open_;  // each is used by its thread alone
  std::deque<std::unique_ptr<Block>> submitted_;            // in the order of submission
};

}  // namespace tilestone::engine
