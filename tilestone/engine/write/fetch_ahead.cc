#include "tilestone/engine/write/fetch_ahead_internal.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"

namespace tilestone::engine {

uint32_t FetchAhead::copy_crc32(const TensorView& tensor, uint64_t begin, MutableByteView out,
                                uint32_t seed) {
  while (!out.empty()) {
    Block& block = front(tensor, begin);
    Portion& portion = block.portions[portion_];
    const uint64_t size = std::min<uint64_t>(portion.size, out.size());
    seed = tilestone::copy_crc32(out.first(size), {block.buffer.data() + portion.at, size}, seed);
    portion.begin += size;
    portion.at += size;
    portion.size -= size;
    if (portion.size == 0) ++portion_;
    begin += size;
    out = out.subspan(size);
  }
  return seed;
}

Buffer FetchAhead::take_whole(const TensorView& tensor, uint64_t begin) {
  Block& block = front(tensor, begin);
  const Portion& portion = block.portions[portion_];
  const bool whole = portion.at == 0 && portion.size == block.buffer.capacity();
  if (!whole) return {};
  ++portion_;
  block.buffer.set_size(block.buffer.capacity());
  return std::move(block.buffer);
}

FetchAhead::Block& FetchAhead::front(const TensorView& tensor, uint64_t begin) {
  if (!blocks_.empty() && portion_ == blocks_.front().portions.size()) {
    blocks_.pop_front();
    portion_ = 0;
    is_ready_ = false;
  }
  if (!is_ready_) {
    fill();
    if (!blocks_.empty()) blocks_.front().copies.wait();
    is_ready_ = true;
  }
  const bool found = !blocks_.empty() &&
                     blocks_.front().portions[portion_].tensor->device == tensor.device &&
                     blocks_.front().portions[portion_].begin == begin;
  if (!found) {
    throw Error(ErrorCode::kInternal, "a tensor's bytes are written in another order than planned");
  }
  return blocks_.front();
}

// Waits for a buffer only if the device has nothing to do.
void FetchAhead::fill() {
  while (next_ < tensors_.size() && blocks_.size() <= kAhead) {
    Buffer buffer = blocks_.empty() ? buffers_->acquire(deadline_) : buffers_->try_acquire();
    if (!buffer) return;
    submit(std::move(buffer));
  }
}

void FetchAhead::submit(Buffer buffer) {
  Block block{std::move(buffer), {}, {}};
  const MutableByteView space = block.buffer.space();
  const std::string& key = *tensors_[next_].key;
  std::vector<DeviceCopy> copies;
  uint64_t used = 0;
  while (next_ < tensors_.size() && used < space.size()) {
    const TensorView& tensor = *tensors_[next_].tensor;
    // A tensor that fills buffers begins in one of its own: full ones are written without a copy.
    if (begin_ == 0 && used > 0 && tensor.bytes() >= space.size()) break;
    const uint64_t size = std::min(tensor.bytes() - begin_, space.size() - used);
    copies.push_back({tensor.device, begin_, space.subspan(used, size)});
    block.portions.push_back({&tensor, begin_, used, size});
    used += size;
    begin_ += size;
    if (begin_ < tensor.bytes()) break;
    ++next_;
    begin_ = 0;
  }
  try {
    block.copies = DeviceBatch(CopyTo::kHost, copies);
  } catch (...) {
    if (copies.size() == 1) throw current_error().with_key(key);
    throw;
  }
  blocks_.push_back(std::move(block));
}

}  // namespace tilestone::engine
