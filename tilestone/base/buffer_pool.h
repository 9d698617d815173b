// A bounded set of page-aligned buffers of one size, allocated once and then reused. Reuse is much
// faster: page faults limit writes to fresh memory to 0.3 to 1.5 GB/s, while only the memory bus
// limits writes to reused memory. Buffers of 2 MiB and more request huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"

namespace tilestone {

class BufferPool;

// A buffer borrowed from a pool. Its destructor gives it back. Move-only. It keeps the pool alive.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  size_t capacity() const { return capacity_; }  // bytes
  size_t size() const { return size_; }          // bytes in use, set by the borrower
  void set_size(size_t size) { size_ = size; }
  MutableByteView space() const { return {data_, capacity_}; }
  ByteView view() const { return {data_, size_}; }

 private:
  friend class BufferPool;
  std::shared_ptr<BufferPool> pool_;
  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
  size_t size_ = 0;
};

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static constexpr size_t kAlignment = 4096;           // bytes; direct I/O requires it
  static constexpr size_t kDefaultBuffer = 8u << 20;   // bytes; fastest for direct writes
  static constexpr size_t kDefaultTotal = 256u << 20;  // bytes
  // Buffers of kDefaultBuffer stay allocated after their pool, for later pools: at most this many
  // bytes in the process.
  static constexpr size_t kSpareTotal = 32u << 20;

  // Called with the memory of each new buffer. Returns an owner of that memory, which the pool
  // keeps (see PinHost in state/tensor_view.h).
  using Pin = std::function<std::shared_ptr<std::byte>(std::shared_ptr<std::byte>, uint64_t)>;

  // A pool of at most max(1, total_bytes / buffer_bytes) buffers, each allocated when first needed.
  // Error(kInvalidArgument) unless buffer_bytes is a positive multiple of kAlignment. Buffers that
  // are pinned are freed with their pool.
  static std::shared_ptr<BufferPool> create(size_t total_bytes = kDefaultTotal,
                                            size_t buffer_bytes = kDefaultBuffer, Pin pin = {});
  ~BufferPool();

  // Waits for a free buffer; Error(kTimeout) after the deadline.
  Buffer acquire(Deadline deadline = Deadline::never());
  // Returns an empty Buffer if none is free now.
  Buffer try_acquire();

  size_t buffer_bytes() const;  // bytes per buffer
  size_t buffers() const;       // the largest number of buffers

 private:
  friend class Buffer;
  struct State;
  BufferPool();
  Buffer lend(std::byte* data);
  void give_back(std::byte* data);
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
