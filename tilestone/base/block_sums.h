// CRC-32s of the blocks of a payload. A reader can check each block by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone {

// The blocks are counted from the payload's start. All have block_bytes bytes, except for the last
// one, which may be shorter.
struct BlockSums {
  uint64_t bytes = 0;        // of the payload
  uint64_t block_bytes = 0;  // a power of two from kLeastBlock to kMaxBlock
  std::vector<uint32_t> crc32;

  static constexpr uint64_t kLeastBlock = 64u << 10;  // bytes
  static constexpr uint64_t kMaxBlock = 1u << 30;     // bytes; a writer uses at most 4 MiB

  // The CRC-32 of the payload, from those of its blocks.
  uint32_t combined() const;
  friend bool operator==(const BlockSums&, const BlockSums&) = default;
};

// The number of blocks. block_bytes > 0.
uint64_t block_count(uint64_t bytes, uint64_t block_bytes);

// The size of the blocks that a writer chooses: 64 KiB to 4 MiB, for about 64 blocks.
uint64_t block_bytes_for(uint64_t payload_bytes);

// Computes the CRC-32s while a payload's bytes are passed to it, in order.
class BlockSummer {
 public:
  explicit BlockSummer(uint64_t payload_bytes);

  // Up to the end of the current block, bytes; and the CRC-32 of what it has so far.
  uint64_t left() const { return sums_.block_bytes - filled_; }
  uint32_t seed() const { return crc_; }
  // The next `bytes` (at most left()) were summed by the caller, continued from seed(), to `crc`.
  void advance(uint64_t bytes, uint32_t crc);
  // Sums the next bytes, any number. Returns their own CRC-32.
  uint32_t add(ByteView bytes);
  // The next `bytes` (at most left()) have this CRC-32 by themselves.
  void add_crc(uint64_t bytes, uint32_t crc);
  // After the last byte.
  BlockSums take();

 private:
  BlockSums sums_;
  uint64_t filled_ = 0;  // bytes of the current block
  uint32_t crc_ = 0;     // of these
};

}  // namespace tilestone
