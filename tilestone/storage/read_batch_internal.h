// The ops of a batch of reads and their blocks, which the workers of posix_reader.cc share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// A block of an op.
struct PartialRead {
  size_t op = 0;                // the index of the op
  uint64_t number = 0;          // the index of the block in its op
  uint64_t begin = 0, end = 0;  // the byte range in the file
  uint64_t size() const { return end - begin; }
};

// The CRC-32s of a block's bytes, which are passed in order. They are cut where the op wants it.
class BlockCrcs {
 public:
  // Bytes that the op wants one CRC-32 of, or the part of them that is in the block.
  struct Cut {
    uint64_t begin = 0;  // in the op, bytes
    uint64_t size = 0;   // bytes
    uint32_t crc32 = 0;
  };

  BlockCrcs() = default;  // no checksums are wanted
  BlockCrcs(const ReadOp& op, const PartialRead& block);

  void add(ByteView bytes);
  // Copies `source` to `target`, of the same size, and adds it.
  void copy(MutableByteView target, ByteView source);
  const std::vector<Cut>& cuts() const { return cuts_; }

 private:
  Cut& cut_at(uint64_t& left);

  uint64_t at_ = 0;    // in the op, bytes
  uint64_t step_ = 0;  // as ReadOp::crc_bytes, never 0
  std::vector<Cut> cuts_;
};

// Each op is cut into blocks of at most 8 MiB of the file, at aligned offsets. If the file range
// and the memory have the same alignment, the unaligned bytes at the two ends of the op are blocks
// of their own. Thread-safe.
class ReadBatch {
 public:
  // With done == nullptr the ops are only read into the page cache. All arguments are borrowed.
  ReadBatch(PosixContext& context, std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone* done);

  PosixContext& context() { return context_; }
  const ReadOp& op(size_t index) const { return ops_[index]; }
  const ReadOptions& options() const { return options_; }
  uint64_t blocks() const { return first_block_.back(); }

  // Returns the next block, or nullopt if there is none or the batch was stopped.
  std::optional<PartialRead> take();

  bool prefetches() const { return done_ == nullptr; }
  // Whether to leave what is read in the page cache.
  bool keeps() const { return options_.cache == CachePolicy::kKeep; }
  // Whether to read the block into large folios.
  bool wants_large_folios(const PartialRead& block) const;
  bool wants_crc(const PartialRead& block) const {
    return !prefetches() && ops_[block.op].crc32 != nullptr;
  }

  // Records that the block has been read to its target. For an op without a target, `bytes` is the
  // whole op. Calls `done` after the last block of an op.
  void finished(const PartialRead& block, ByteView bytes, const BlockCrcs& crcs);

  void fetches(const PartialRead& block) { fetched_ += block.size(); }
  uint64_t fetched() const { return fetched_; }

  void stop() { stopped_.store(true, std::memory_order_relaxed); }

 private:
  // How an op is cut: an aligned middle [begin, end) of the file, which is cut every block_bytes_
  // bytes, and possibly a block before it (head) and one after it (tail).
  struct BatchLayout {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool head = false;
    bool tail = false;
  };

  BatchLayout layout(const ReadOp& op) const;
  uint64_t blocks_of(const ReadOp& op) const;
  PartialRead block(size_t index, uint64_t number) const;
  PartialRead block(uint64_t number) const;  // counted over all ops

  PosixContext& context_;
  std::span<const ReadOp> ops_;
  const ReadOptions& options_;
  const ReadDone* done_;
  uint64_t block_bytes_;
  std::vector<uint64_t> first_block_;  // by op, the number of its first block; then the total
  std::vector<std::atomic<uint64_t>> remaining_;  // by op, the number of blocks not yet read
  std::atomic<uint64_t> next_ = 0;
  std::atomic<uint64_t> fetched_ = 0;  // bytes that were not in the page cache before a prefetch
  std::atomic<bool> stopped_ = false;
};

}  // namespace tilestone
