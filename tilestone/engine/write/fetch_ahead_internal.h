// Fetches tensors from device memory while earlier ones are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone::engine {

// A tensor in device memory. Both are borrowed.
struct FetchedTensor {
  const TensorView* tensor = nullptr;
  const std::string* key = nullptr;
};

// Gives out the bytes of the device tensors of one file, in the order in which they are written.
// Each buffer is a batch of copies. While the writer uses one buffer, the device fills up to
// kAhead further ones. Used by one thread.
class FetchAhead {
 public:
  static constexpr size_t kAhead = 3;      // buffers
  static constexpr size_t kPerStream = 8;  // buffers: those ahead, and those that are written

  // `buffers` has kPerStream for each FetchAhead that uses it.
  FetchAhead(std::vector<FetchedTensor> tensors, std::shared_ptr<BufferPool> buffers,
             Deadline deadline)
      : tensors_(std::move(tensors)), buffers_(std::move(buffers)), deadline_(deadline) {}

  // The next bytes of the tensor: those from byte `begin` on. Continues the CRC-32 `seed` over
  // them, and returns it. Error(kInternal) if they are not the next ones.
  uint32_t copy_crc32(const TensorView& tensor, uint64_t begin, MutableByteView out, uint32_t seed);
  // The next bytes in their own buffer, if it has nothing else and is full of whole pages;
  // otherwise no buffer.
  Buffer take_whole(const TensorView& tensor, uint64_t begin);

 private:
  // Consecutive bytes of a tensor in a buffer.
  struct Portion {
    const TensorView* tensor = nullptr;
    uint64_t begin = 0;  // in the tensor
    uint64_t at = 0;     // in the buffer
    uint64_t size = 0;
  };
  struct Block {
    Buffer buffer;
    std::vector<Portion> portions;
    DeviceBatch copies;  // the last member: it is destroyed, and so waited for, first
  };

  Block& front(const TensorView& tensor, uint64_t begin);
  void fill();
  void submit(Buffer buffer);

  const std::vector<FetchedTensor> tensors_;
  const std::shared_ptr<BufferPool> buffers_;
  const Deadline deadline_;
  size_t next_ = 0;     // the tensor that is submitted next
  uint64_t begin_ = 0;  // from this byte on
  std::deque<Block> blocks_;
  bool is_ready_ = false;  // the first block was waited for
  size_t portion_ = 0;     // of the first block, that is given out next
};

}  // namespace tilestone::engine
