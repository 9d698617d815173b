#include "tilestone/base/buffer_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/huge_pages.h"
#include "tilestone/base/per_process.h"

namespace tilestone {
namespace {

// Buffers of the default size that belong to no pool now. A call that makes a pool for itself then
// gets memory that was used before. Thread-safe.
class SpareBuffers {
 public:
  SpareBuffers() { buffers_.reserve(kMaxBuffers); }

  std::byte* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes != BufferPool::kDefaultBuffer || buffers_.empty()) return nullptr;
    std::byte* data = buffers_.back();
    buffers_.pop_back();
    return data;
  }
  void put(std::byte* data, size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      if (bytes == BufferPool::kDefaultBuffer && buffers_.size() < kMaxBuffers) {
        buffers_.push_back(data);
        return;
      }
    }
    std::free(data);
  }

 private:
  static constexpr size_t kMaxBuffers = BufferPool::kSpareTotal / BufferPool::kDefaultBuffer;
  std::mutex mutex_;
  std::vector<std::byte*> buffers_;
};

// Never destroyed, because pools of other static objects may be destroyed later.
SpareBuffers& spare_buffers() {
  static const auto* const spare =
      new PerProcess<SpareBuffers>([] { return std::make_unique<SpareBuffers>(); });
  return **spare;
}

// The buffers of one process.
struct Buffers {
  Buffers(size_t bytes, size_t most, const BufferPool::Pin& pin_in)
      : buffer_bytes(bytes), limit(most), pin(pin_in) {
    // Giving a buffer back must not allocate, because it must not throw in a destructor.
    free.reserve(limit);
  }
  ~Buffers() {
    if (pin) return;  // `pinned` owns them
    for (std::byte* data : free) spare_buffers().put(data, buffer_bytes);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  const size_t buffer_bytes;
  const size_t limit;  // most buffers
  const BufferPool::Pin& pin;
  std::mutex mutex;
  std::condition_variable given_back;
  std::vector<std::byte*> free;
  size_t allocated = 0;  // buffers, free or lent
  std::vector<std::shared_ptr<std::byte>> pinned;

  // Returns a free buffer, or null. `reserved` is set to true if the caller must allocate one more.
  std::byte* take(bool& reserved) {
    reserved = false;
    if (!free.empty()) {
      std::byte* data = free.back();
      free.pop_back();
      return data;
    }
    if (allocated < limit) {
      ++allocated;
      reserved = true;
    }
    return nullptr;
  }

  // Called without the lock, after take() has set `reserved`. Fresh memory is slow because of the
  // page fault at the first write to each page.
  std::byte* allocate() {
    try {
      return pin ? pinned_memory() : memory();
    } catch (...) {
      {
        const std::lock_guard lock(mutex);
        --allocated;
      }
      given_back.notify_one();
      throw;
    }
  }

 private:
  std::byte* memory() const {
    if (!pin) {
      if (std::byte* data = spare_buffers().take(buffer_bytes)) return data;
    }
    const bool huge = buffer_bytes >= kHugePage;
    void* memory = nullptr;
    if (posix_memalign(&memory, huge ? kHugePage : BufferPool::kAlignment, buffer_bytes) != 0) {
      throw std::bad_alloc();
    }
    prefer_huge_pages(memory, buffer_bytes);
    return static_cast<std::byte*>(memory);
  }

  std::byte* pinned_memory() {
    std::shared_ptr<std::byte> owner = pin({memory(), std::free}, buffer_bytes);
    std::byte* const data = owner.get();
    const std::lock_guard lock(mutex);
    pinned.push_back(std::move(owner));
    return data;
  }
};

}  // namespace

// A forked child starts with no buffers: those that the parent has lent never come back there.
struct BufferPool::State {
  State(size_t bytes, size_t most, Pin pin_in)
      : buffer_bytes(bytes),
        limit(most),
        pin(std::move(pin_in)),
        buffers([this] { return std::make_unique<Buffers>(buffer_bytes, limit, pin); }) {}
  const size_t buffer_bytes;
  const size_t limit;
  const Pin pin;
  const PerProcess<Buffers> buffers;
};

Buffer::Buffer(Buffer&& other) noexcept
    : pool_(std::move(other.pool_)),
      data_(std::exchange(other.data_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Buffer taken(std::move(other));
  std::swap(pool_, taken.pool_);
  std::swap(data_, taken.data_);
  std::swap(capacity_, taken.capacity_);
  std::swap(size_, taken.size_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) pool_->give_back(data_);
}

std::shared_ptr<BufferPool> BufferPool::create(size_t total_bytes, size_t buffer_bytes, Pin pin) {
  if (buffer_bytes == 0 || buffer_bytes % kAlignment != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the buffer size of a pool must be a positive multiple of {} bytes, not {}",
                    kAlignment, buffer_bytes));
  }
  std::shared_ptr<BufferPool> pool(new BufferPool);
  pool->state_ = std::make_unique<State>(
      buffer_bytes, std::max<size_t>(1, total_bytes / buffer_bytes), std::move(pin));
  return pool;
}

BufferPool::BufferPool() = default;
BufferPool::~BufferPool() = default;

Buffer BufferPool::acquire(Deadline deadline) {
  Buffers& buffers = *state_->buffers;
  std::byte* data = nullptr;
  bool reserved = false;
  {
    std::unique_lock lock(buffers.mutex);
    while ((data = buffers.take(reserved)) == nullptr && !reserved) {
      if (deadline.expired()) {
        throw Error(ErrorCode::kTimeout,
                    fmt::format("the deadline passed while all {} buffers of {} bytes were in use",
                                state_->limit, state_->buffer_bytes))
            .with_hint("use a larger buffer pool or a longer timeout");
      }
      buffers.given_back.wait_for(lock, deadline.wait_time());
    }
  }
  return lend(reserved ? buffers.allocate() : data);
}

Buffer BufferPool::try_acquire() {
  Buffers& buffers = *state_->buffers;
  std::byte* data = nullptr;
  bool reserved = false;
  {
    const std::lock_guard lock(buffers.mutex);
    data = buffers.take(reserved);
  }
  if (reserved) data = buffers.allocate();
  return data == nullptr ? Buffer() : lend(data);
}

Buffer BufferPool::lend(std::byte* data) {
  Buffer buffer;
  buffer.pool_ = shared_from_this();
  buffer.data_ = data;
  buffer.capacity_ = state_->buffer_bytes;
  return buffer;
}

size_t BufferPool::buffer_bytes() const { return state_->buffer_bytes; }

size_t BufferPool::buffers() const { return state_->limit; }

void BufferPool::give_back(std::byte* data) {
  Buffers& buffers = *state_->buffers;
  {
    const std::lock_guard lock(buffers.mutex);
    buffers.free.push_back(data);
  }
  buffers.given_back.notify_one();
}

}  // namespace tilestone
