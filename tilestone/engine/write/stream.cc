#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/write/stream_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kAlignment = BufferPool::kAlignment;
constexpr uint64_t kKeptFrom = 4u << 20;   // bytes; for smaller tensors a copy is cheaper
constexpr uint64_t kKeptBlock = 8u << 20;  // bytes per write, which ends at a multiple of these

void check_segment(uint64_t expected, uint64_t found) {
  if (expected == found) return;
  throw Error(ErrorCode::kInternal, "a segment of an item has " + std::to_string(found) +
                                        " bytes, but its recipe says " + std::to_string(expected));
}

}  // namespace

ItemChecksums FileStream::write(const ItemRecipe& recipe) {
  zeros(recipe.padding);
  ItemChecksums sums{recipe.payload_offset, 0, 0};
  for (const Segment& segment : recipe.segments) {
    if (segment.literal != nullptr) {
      check_segment(segment.size, segment.literal->view().size());
      sums.item_crc32 = literal(with_crc32(*segment.literal, sums.payload_crc32), sums.item_crc32);
    } else {
      payload(segment, sums);
      sums.item_crc32 = crc32_combine(sums.item_crc32, sums.payload_crc32, segment.size);
    }
  }
  return sums;
}

void FileStream::payload(const Segment& segment, ItemChecksums& sums) {
  BlockSummer summer(segment.size);
  if (segment.padding != nullptr) {
    padded(*segment.tensor, *segment.padding, segment.size, summer);
  } else {
    tensor(*segment.tensor, segment.size, summer);
  }
  BlockSums blocks = summer.take();
  sums.payload_crc32 = blocks.combined();
  if (blocks.crc32.size() > 1) sums.blocks = std::make_shared<const BlockSums>(std::move(blocks));
}

void FileStream::finish() {
  if (buffer_ && buffer_.size() > 0) file_.append(std::move(buffer_));
  buffer_ = Buffer();
}

MutableByteView FileStream::room(uint64_t wanted) {
  if (!buffer_) {
    buffer_ = context_.buffers->acquire(context_.deadline);
    buffer_.set_size(0);
  }
  const size_t left = buffer_.capacity() - buffer_.size();
  return buffer_.space().subspan(buffer_.size(), std::min<uint64_t>(left, wanted));
}

void FileStream::advance(size_t bytes) {
  buffer_.set_size(buffer_.size() + bytes);
  position_ += bytes;
  if (buffer_.size() == buffer_.capacity()) {
    file_.append(std::move(buffer_));
    buffer_ = Buffer();
  }
}

void FileStream::zeros(uint64_t count) {
  while (count > 0) {
    const MutableByteView out = room(count);
    std::memset(out.data(), 0, out.size());
    advance(out.size());
    count -= out.size();
  }
}

ByteView FileStream::with_crc32(const Literal& literal, uint32_t crc) {
  if (literal.crc32_at.empty()) return literal.view();
  patched_ = literal.bytes;
  for (uint64_t at : literal.crc32_at) std::memcpy(patched_.data() + at, &crc, sizeof(crc));
  return patched_;
}

uint32_t FileStream::literal(ByteView bytes, uint32_t seed) {
  while (!bytes.empty()) {
    const MutableByteView out = room(bytes.size());
    seed = copy_crc32(out, bytes.first(out.size()), seed);
    bytes = bytes.subspan(out.size());
    advance(out.size());
  }
  return seed;
}

void FileStream::tensor(const TensorView& tensor, uint64_t size, BlockSummer& sums) {
  check_segment(size, tensor.bytes());
  if (tensor.device != nullptr) return fetched(tensor, size, sums);
  if (!can_keep(tensor, size)) return packed(tensor, 0, size, sums);
  const uint64_t begin = align_up(position_, kAlignment) - position_;
  const uint64_t middle = align_down(size - begin, kAlignment);
  packed(tensor, 0, begin, sums);
  kept({tensor.data + begin, middle}, sums);
  packed(tensor, begin + middle, size, sums);
}

bool FileStream::can_keep(const TensorView& tensor, uint64_t size) const {
  if (size < kKeptFrom) return false;
  const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(tensor.data));
  return (address - position_) % kAlignment == 0 && tensor.strided_view().is_contiguous();
}

void FileStream::check_time() const {
  if (!context_.deadline.expired()) return;
  throw Error(ErrorCode::kTimeout, "the deadline passed while writing").with_file(file_.name());
}

// Writes bytes [begin, end) of the tensor through the buffers.
void FileStream::packed(const TensorView& tensor, uint64_t begin, uint64_t end, BlockSummer& sums) {
  while (begin < end) {
    check_time();
    const MutableByteView out = room(std::min(end - begin, sums.left()));
    sums.advance(out.size(), pack(tensor, begin, out, sums.seed()));
    begin += out.size();
    context_.progress->add(out.size());
    advance(out.size());
  }
}

// The checksums include the padding's zeros.
void FileStream::padded(const TensorView& tensor, const Padding& padding, uint64_t size,
                        BlockSummer& sums) {
  check_segment(size, padding.padded_bytes());
  for (uint64_t begin = 0; begin < size;) {
    check_time();
    const MutableByteView out = room(size - begin);
    const Padding::Inner inner = padding.inside(begin, begin + out.size());
    const uint64_t found = inner.end - inner.begin;
    if (found > 0) pack(tensor, inner.begin, out.first(found), 0);
    padding.spread(begin, out);
    sums.add(out);
    begin += out.size();
    context_.progress->add(found);
    advance(out.size());
  }
}

// Writes bytes directly from the caller's memory. Computes the checksums of what is being written.
void FileStream::kept(ByteView bytes, BlockSummer& sums) {
  finish();
  while (!bytes.empty()) {
    check_time();
    const ByteView block =
        bytes.first(std::min<uint64_t>(bytes.size(), kKeptBlock - position_ % kKeptBlock));
    file_.append_kept(block, sums.add(block));
    position_ += block.size();
    context_.progress->add(block.size());
    bytes = bytes.subspan(block.size());
  }
}

// Writes a tensor in device memory: full buffers as they were fetched, the rest as packed().
void FileStream::fetched(const TensorView& tensor, uint64_t size, BlockSummer& sums) {
  uint64_t begin = 0;
  while (begin < size && position_ % kAlignment == 0) {
    check_time();
    Buffer whole = fetched_.take_whole(tensor, begin);
    if (!whole) break;
    finish();
    const uint64_t bytes = whole.size();
    sums.add(whole.view());
    file_.append(std::move(whole));
    position_ += bytes;
    begin += bytes;
    context_.progress->add(bytes);
  }
  packed(tensor, begin, size, sums);
}

uint32_t FileStream::pack(const TensorView& tensor, uint64_t begin, MutableByteView out,
                          uint32_t seed) {
  if (tensor.device != nullptr) return fetched_.copy_crc32(tensor, begin, out, seed);
  return pack_range_crc32(tensor.strided_view(), begin, out, seed);
}

}  // namespace tilestone::engine
