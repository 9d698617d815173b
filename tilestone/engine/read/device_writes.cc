#include "tilestone/engine/read/device_writes_internal.h"

#include <string>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/run/resources_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kPlaced = 64;  // bytes; a multiple of every item size
// Buffers are made when needed: one for each thread that reads, and those in flight.
constexpr size_t kThreads = 8;
constexpr size_t kPerThread = 128;

// Where the next bytes of a block begin: after its last copy, if they continue it.
uint64_t place_in(const std::vector<DeviceCopy>& copies, const std::byte* block, bool continues) {
  if (copies.empty()) return 0;
  const MutableByteView last = copies.back().host;
  const auto end = static_cast<uint64_t>(last.data() + last.size() - block);
  return continues ? end : align_up(end, kPlaced);
}

}  // namespace

void DeviceWrites::expect(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!expected_) expected_ = bytes;
}

uint64_t DeviceWrites::block_bytes(const DeviceMemory& device) {
  const std::lock_guard lock(mutex_);
  return buffers(device).buffer_bytes();
}

BufferPool& DeviceWrites::buffers(const DeviceMemory& device) {
  if (buffers_ == nullptr) {
    constexpr uint64_t kTotal = kThreads * kPerThread * BufferPool::kDefaultBuffer;
    buffers_ = make_pinned_pool(kTotal, kThreads, kPerThread, expected_.value_or(kTotal), device);
  }
  return *buffers_;
}

void DeviceWrites::write(const std::shared_ptr<DeviceMemory>& memory, uint64_t begin,
                         uint64_t bytes, const std::function<void(std::byte*)>& fill) {
  Block& block = with_room(bytes, *memory);
  std::vector<DeviceCopy>& copies = block.copies;
  const bool continues = !copies.empty() && copies.back().memory == memory &&
                         copies.back().begin + copies.back().host.size() == begin;
  const MutableByteView host =
      block.buffer.space().subspan(place_in(copies, block.buffer.data(), continues), bytes);
  fill(host.data());
  if (continues) {
    MutableByteView& last = copies.back().host;
    last = {last.data(), last.size() + bytes};
  } else {
    copies.push_back({memory, begin, host});
  }
}

// This thread's block, or a new one if it has not enough room.
DeviceWrites::Block& DeviceWrites::with_room(uint64_t bytes, const DeviceMemory& device) {
  const std::lock_guard lock(mutex_);
  BufferPool& pool = buffers(device);
  if (bytes > pool.buffer_bytes()) {
    throw Error(ErrorCode::kInternal, std::to_string(bytes) + " bytes don't fit in one block");
  }
  std::unique_ptr<Block>& block = open_[std::this_thread::get_id()];
  if (block != nullptr &&
      place_in(block->copies, block->buffer.data(), false) + bytes > pool.buffer_bytes()) {
    submit(std::move(block));
  }
  if (block == nullptr) {
    Buffer buffer;
    if (submitted_.size() >= kInFlight) buffer = std::move(wait_for_first()->buffer);
    if (!buffer) buffer = pool.acquire();
    block = std::make_unique<Block>();
    block->buffer = std::move(buffer);
  }
  return *block;
}

void DeviceWrites::submit(std::unique_ptr<Block> block) {
  if (block->copies.empty()) return;
  block->batch = DeviceBatch(CopyTo::kDevice, block->copies);
  submitted_.push_back(std::move(block));
}

// Waits for the oldest batch; the device has others to do meanwhile.
std::unique_ptr<DeviceWrites::Block> DeviceWrites::wait_for_first() {
  std::unique_ptr<Block> first = std::move(submitted_.front());
  submitted_.pop_front();
  first->batch.wait();
  return first;
}

void DeviceWrites::finish() {
  const std::lock_guard lock(mutex_);
  for (auto& [thread, block] : open_) {
    if (block != nullptr) submit(std::move(block));
  }
  open_.clear();
  while (!submitted_.empty()) wait_for_first();
}

}  // namespace tilestone::engine
