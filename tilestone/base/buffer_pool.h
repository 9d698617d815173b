// A bounded set of page-aligned buffers of one size, allocated once and then reused: fresh memory
// is bound by page faults (0.3 to 1.5 GB/s), reused memory by the memory bus. Buffers of 2 MiB and
// more ask for huge pages.
#pragma once

#include <cstddef>
#include <memory>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"

namespace tilestone {

class BufferPool;

// One buffer on loan, given back when the object goes. Move-only. Must not outlive its pool's
// last shared_ptr holder; the Buffer itself keeps the pool's memory alive.
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
  static constexpr size_t kAlignment = 4096;           // bytes; what direct I/O asks of memory
  static constexpr size_t kDefaultBuffer = 8u << 20;   // bytes; best for direct writes
  static constexpr size_t kDefaultTotal = 256u << 20;  // bytes

  // At most max(1, total_bytes / buffer_bytes) buffers; memory is taken as it is first needed.
  // buffer_bytes must be a multiple of kAlignment.
  static std::shared_ptr<BufferPool> create(size_t total_bytes = kDefaultTotal,
                                            size_t buffer_bytes = kDefaultBuffer);
  ~BufferPool();

  // Waits for a free buffer; Error(kTimeout) past the deadline.
  Buffer acquire(Deadline deadline = Deadline::never());
  // An empty Buffer when none is free now.
  Buffer try_acquire();

  size_t buffer_bytes() const;
  size_t buffers() const;     // how many there may be
  size_t peak_bytes() const;  // most memory ever allocated

 private:
  friend class Buffer;
  struct State;
  BufferPool();
  Buffer lend(std::byte* data);
  void give_back(std::byte* data);
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
