#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/storage/read_batch_internal.h"
#include "tilestone/storage/read_ops_internal.h"

namespace tilestone {
namespace {

constexpr uint64_t kMaxBlock = 8u << 20;    // bytes
constexpr uint64_t kMinSplit = 8u << 20;    // bytes; smaller ops are not cut into three blocks
constexpr uint64_t kReadAhead = 12u << 20;  // bytes; the kernel's 8 MiB and the folios at both ends
constexpr uint64_t kMinFolios = 64u << 20;  // bytes; smaller ops are not worth kReadAhead

}  // namespace

ReadBatch::ReadBatch(PosixContext& context, std::span<const ReadOp> ops, const ReadOptions& options,
                     const ReadDone* done)
    : context_(context), ops_(ops), options_(options), done_(done), remaining_(ops.size()) {
  block_bytes_ = kMaxBlock;
  if (options.buffers != nullptr) {
    const uint64_t buffer = align_down(options.buffers->buffer_bytes(), kAlignment);
    block_bytes_ = std::min<uint64_t>(block_bytes_, buffer);
  }
  first_block_.reserve(ops.size() + 1);
  first_block_.push_back(0);
  for (size_t i = 0; i < ops.size(); ++i) {
    if (!prefetches()) clear_checksums(ops[i]);
    const uint64_t blocks = blocks_of(ops[i]);
    remaining_[i].store(blocks, std::memory_order_relaxed);
    first_block_.push_back(first_block_.back() + blocks);
  }
}

std::optional<PartialRead> ReadBatch::take() {
  if (stopped_.load(std::memory_order_relaxed)) return std::nullopt;
  const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  if (number >= blocks()) return std::nullopt;
  return block(number);
}

PartialRead ReadBatch::block(uint64_t number) const {
  const auto after = std::upper_bound(first_block_.begin(), first_block_.end(), number);
  const auto index = static_cast<size_t>(after - first_block_.begin()) - 1;
  return block(index, number - first_block_[index]);
}

// When a large folio is copied, the kernel reads ahead, so up to kReadAhead bytes after the op
// would be read too.
bool ReadBatch::wants_large_folios(const PartialRead& block) const {
  const ReadOp& op = ops_[block.op];
  return op.size >= kMinFolios && op.offset + op.size - block.end >= kReadAhead;
}

void ReadBatch::finished(const PartialRead& block, ByteView bytes, const BlockCrcs& crcs) {
  if (prefetches()) return;
  const ReadOp& op = ops_[block.op];
  if (op.crc32 != nullptr) {
    for (const BlockCrcs::Cut& cut : crcs.cuts()) add_checksum(op, cut.begin, cut.size, cut.crc32);
  }
  if (remaining_[block.op].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  if (stopped_.load(std::memory_order_relaxed)) return;
  (*done_)(block.op, op.target != nullptr ? ByteView(op.target, op.size) : bytes);
}

ReadBatch::BatchLayout ReadBatch::layout(const ReadOp& op) const {
  const uint64_t end = op.offset + op.size;
  const uint64_t first = align_up(op.offset, kAlignment);
  const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(op.target));
  const bool same_alignment = (address - op.offset) % kAlignment == 0;
  if (!same_alignment || op.size < kMinSplit) {
    return {align_down(op.offset, kAlignment), end, false, false};
  }
  const uint64_t last = align_down(end, kAlignment);
  return {first, last, first > op.offset, last < end};
}

uint64_t ReadBatch::blocks_of(const ReadOp& op) const {
  if (op.target == nullptr || op.size == 0) return 1;
  const BatchLayout at = layout(op);
  return (at.end - at.begin + block_bytes_ - 1) / block_bytes_ + at.head + at.tail;
}

PartialRead ReadBatch::block(size_t index, uint64_t number) const {
  const ReadOp& op = ops_[index];
  const uint64_t op_end = op.offset + op.size;
  if (op.target == nullptr || op.size == 0) return {index, number, op.offset, op_end};
  const BatchLayout at = layout(op);
  if (at.head && number == 0) return {index, number, op.offset, at.begin};
  const uint64_t grid = at.begin + (number - at.head) * block_bytes_;
  if (grid >= at.end) return {index, number, at.end, op_end};
  return {index, number, std::max(grid, op.offset), std::min(grid + block_bytes_, at.end)};
}

BlockCrcs::BlockCrcs(const ReadOp& op, const PartialRead& block)
    : at_(block.begin - op.offset), step_(crc_step(op)) {}

// The cut at at_, and in `left` how many bytes it still takes.
BlockCrcs::Cut& BlockCrcs::cut_at(uint64_t& left) {
  left = step_ - at_ % step_;
  if (cuts_.empty() || at_ % step_ == 0) cuts_.push_back({at_, 0, 0});
  return cuts_.back();
}

void BlockCrcs::add(ByteView bytes) {
  while (!bytes.empty()) {
    uint64_t left = 0;
    Cut& cut = cut_at(left);
    const ByteView part = bytes.first(std::min<uint64_t>(left, bytes.size()));
    cut.crc32 = crc32(part, cut.crc32);
    cut.size += part.size();
    at_ += part.size();
    bytes = bytes.subspan(part.size());
  }
}

void BlockCrcs::copy(MutableByteView target, ByteView source) {
  for (size_t done = 0; done < source.size();) {
    uint64_t left = 0;
    Cut& cut = cut_at(left);
    const size_t size = std::min<uint64_t>(left, source.size() - done);
    cut.crc32 = copy_crc32(target.subspan(done, size), source.subspan(done, size), cut.crc32);
    cut.size += size;
    at_ += size;
    done += size;
  }
}

}  // namespace tilestone
