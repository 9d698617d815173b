// Plans reads of a chunk by whole blocks, so that every byte that is read can be checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/state/chunk_blocks.h"

namespace tilestone::engine {

// One read of consecutive bytes of a chunk's payload. Offsets are from the payload's start.
struct BlockRead {
  uint64_t begin = 0;  // bytes
  uint64_t end = 0;
  // Where the bytes go, unchanged: whole blocks. Null: into a buffer, at most one block.
  std::byte* target = nullptr;
};

// The reads of all blocks that have elements of the transfers, in ascending order, each block once.
// A block goes straight to its target if all of it is wanted there in one piece, even by several
// transfers that follow one another in the payload and in memory. max_buffered: the most bytes of a
// read without a target, at least 64.
std::vector<BlockRead> plan_block_reads(const ChunkBlocks& blocks, const StoredPayload& payload,
                                        std::span<const Transfer* const> transfers,
                                        uint64_t max_buffered);

// Calls visit with the parts that the bytes [begin, end) of the payload consist of, in order: at
// most 2 n - 1 for n dims. A part's box may be outside the chunk, in the padding of a cell. The
// bytes must be whole elements.
void for_each_part(const ChunkBlocks& blocks, uint64_t begin, uint64_t end,
                   const std::function<void(const Part&)>& visit);

// Throws Error(kCorrupt) as fail_chunk(), with the bytes of the file, unless the CRC-32 `found` of
// a block is the expected one.
void expect_block(const ReadContext& context, ChunkRef chunk, const ChunkBlocks& blocks,
                  uint64_t block, uint32_t found);

// Reads the chunk and returns the blocks whose CRC-32 is not the expected one.
std::vector<uint64_t> damaged_blocks(const ReadContext& context, ChunkRef chunk,
                                     const ChunkBlocks& blocks);

}  // namespace tilestone::engine
