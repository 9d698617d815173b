#include "tilestone/base/buffer_pool.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;  // bytes

}  // namespace

struct BufferPool::State {
  size_t buffer_bytes = 0;
  size_t limit = 0;  // buffers
  std::mutex mutex;
  std::condition_variable given_back;
  std::vector<std::byte*> free;
  size_t allocated = 0;  // buffers, free or on loan; never shrinks

  // A free buffer, or nullptr with `reserved` true where the caller may allocate one more.
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

  // Outside the lock. The first write to each page is what makes fresh memory slow; huge pages
  // make that a few hundred times rarer, where the system gives them.
  std::byte* allocate() {
    const bool huge = buffer_bytes >= kHugePage;
    void* memory = nullptr;
    if (posix_memalign(&memory, huge ? kHugePage : kAlignment, buffer_bytes) != 0) {
      {
        const std::lock_guard lock(mutex);
        --allocated;
      }
      given_back.notify_one();
      throw std::bad_alloc();
    }
    if (huge) ::madvise(memory, buffer_bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
    return static_cast<std::byte*>(memory);
  }
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

std::shared_ptr<BufferPool> BufferPool::create(size_t total_bytes, size_t buffer_bytes) {
  if (buffer_bytes == 0 || buffer_bytes % kAlignment != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("a buffer of {} bytes; expected a multiple of {}", buffer_bytes, kAlignment));
  }
  std::shared_ptr<BufferPool> pool(new BufferPool);
  pool->state_->buffer_bytes = buffer_bytes;
  pool->state_->limit = std::max<size_t>(1, total_bytes / buffer_bytes);
  // So that giving a buffer back never allocates, and can't throw in a destructor.
  pool->state_->free.reserve(pool->state_->limit);
  return pool;
}

BufferPool::BufferPool() : state_(std::make_unique<State>()) {}

BufferPool::~BufferPool() {
  for (std::byte* data : state_->free) std::free(data);
}

Buffer BufferPool::acquire(Deadline deadline) {
  std::byte* data = nullptr;
  bool reserved = false;
  {
    std::unique_lock lock(state_->mutex);
    while ((data = state_->take(reserved)) == nullptr && !reserved) {
      if (deadline.expired()) {
        throw Error(ErrorCode::kTimeout,
                    fmt::format("no buffer became free: all {} of {} bytes are in use",
                                state_->limit, state_->buffer_bytes))
            .with_hint("a larger buffer pool, or a later deadline, may help");
      }
      state_->given_back.wait_for(lock, deadline.wait_time());
    }
  }
  return lend(reserved ? state_->allocate() : data);
}

Buffer BufferPool::try_acquire() {
  std::byte* data = nullptr;
  bool reserved = false;
  {
    const std::lock_guard lock(state_->mutex);
    data = state_->take(reserved);
  }
  if (reserved) data = state_->allocate();
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

size_t BufferPool::peak_bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->allocated * state_->buffer_bytes;
}

void BufferPool::give_back(std::byte* data) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->free.push_back(data);
  }
  state_->given_back.notify_one();
}

}  // namespace tilestone
