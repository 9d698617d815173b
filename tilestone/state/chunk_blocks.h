// The parts of a stored chunk that a reader can check one by one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "tilestone/state/metadata.h"

namespace tilestone {

// The blocks of a chunk's payload. The payload's elements are in C order. `expected` borrows from
// the metadata.
struct ChunkBlocks {
  uint64_t begin = 0;        // of the payload, from the start of the item, bytes
  uint64_t bytes = 0;        // of the payload, at least 1
  uint64_t block_bytes = 0;  // at least BlockSums::kLeastBlock; the last block may be shorter
  std::span<const uint32_t> expected;  // the CRC-32 of each block
  // The payload's shape. Larger than the chunk's where items have the size of a complete cell; the
  // chunk is then in its corner.
  Dims shape;
  uint64_t itemsize = 1;

  uint64_t block_begin(uint64_t block) const { return block * block_bytes; }
  uint64_t block_end(uint64_t block) const {
    return block + 1 < expected.size() ? (block + 1) * block_bytes : bytes;
  }
};

// Elements of a box whose places in the payload follow one another, with or without short gaps.
struct ChunkRun {
  Box box;
  uint64_t offset = 0;  // of the first element, from the payload's start, bytes
  uint64_t size = 0;    // from the start of the first element to the end of the last, bytes
};

// Calls visit for each run of `box`, which is a box of the chunk and not empty, in ascending order.
// Dims are joined, from the innermost outwards, as long as the gaps between indices are shorter
// than least_gap (bytes, at least 1). All runs of a box have the same size.
void for_each_run(const ChunkBlocks& blocks, const Box& box, uint64_t least_gap,
                  const std::function<void(const ChunkRun&)>& visit);
// The size of these runs, bytes.
uint64_t run_bytes(const ChunkBlocks& blocks, const Box& box, uint64_t least_gap);

// Sets needed[i - first] to 1 for each block i that has elements of `box` (of the chunk).
void mark_blocks(const ChunkBlocks& blocks, const Box& box, std::vector<char>& needed,
                 uint64_t first = 0);

// The blocks of tensors[tensor].chunks[chunk] in its own item (kNoCopy) or at copies[copy]. A
// payload of at most BlockSums::kLeastBlock bytes is one block. nullopt: the chunk can only be
// checked as a whole, if at all. Error(kCorrupt), with key and file, if the recorded blocks are not
// those of the chunk.
std::optional<ChunkBlocks> blocks_of(const Metadata& metadata, uint32_t tensor, uint32_t chunk,
                                     uint32_t copy = kNoCopy);

}  // namespace tilestone
