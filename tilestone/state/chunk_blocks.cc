#include "tilestone/state/chunk_blocks.h"
#include "tilestone/base/block_sums.h"

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"

namespace tilestone {
namespace {

// How a box splits into runs: dims before `outer` are walked index by index.
struct RunShape {
  size_t outer = 0;
  uint64_t size = 0;  // of a run, bytes
  Dims steps;         // bytes between adjacent indices of a dim
};

RunShape shape_of_runs(const ChunkBlocks& blocks, const Box& box, uint64_t least_gap) {
  RunShape runs{box.rank(), blocks.itemsize, contiguous_strides(blocks.shape)};
  for (size_t d = 0; d < runs.steps.size(); ++d) {
    runs.steps[d] *= static_cast<int64_t>(blocks.itemsize);
  }
  for (; runs.outer > 0; --runs.outer) {
    const size_t d = runs.outer - 1;
    if (box.shape[d] == 1) continue;
    const auto step = static_cast<uint64_t>(runs.steps[d]);
    if (step - runs.size >= least_gap) break;
    runs.size += static_cast<uint64_t>(box.shape[d] - 1) * step;
  }
  return runs;
}

}  // namespace

uint64_t run_bytes(const ChunkBlocks& blocks, const Box& box, uint64_t least_gap) {
  return shape_of_runs(blocks, box, least_gap).size;
}

void for_each_run(const ChunkBlocks& blocks, const Box& box, uint64_t least_gap,
                  const std::function<void(const ChunkRun&)>& visit) {
  const RunShape runs = shape_of_runs(blocks, box, least_gap);
  ChunkRun run{box, 0, runs.size};
  for (size_t d = 0; d < box.rank(); ++d) {
    run.offset += static_cast<uint64_t>(box.offset[d] * runs.steps[d]);
    if (d < runs.outer) run.box.shape[d] = 1;
  }
  while (true) {
    visit(run);
    size_t d = runs.outer;
    for (; d > 0; --d) {
      const auto step = static_cast<uint64_t>(runs.steps[d - 1]);
      run.offset += step;
      if (++run.box.offset[d - 1] < box.end(d - 1)) break;
      run.offset -= step * static_cast<uint64_t>(box.shape[d - 1]);
      run.box.offset[d - 1] = box.offset[d - 1];
    }
    if (d == 0) return;
  }
}

// A block that lies between two runs is needed by neither, so only gaps of at least a block matter.
void mark_blocks(const ChunkBlocks& blocks, const Box& box, std::vector<char>& needed,
                 uint64_t first) {
  if (box.empty()) return;
  for_each_run(blocks, box, blocks.block_bytes, [&](const ChunkRun& run) {
    const uint64_t last = (run.offset + run.size - 1) / blocks.block_bytes;
    for (uint64_t b = run.offset / blocks.block_bytes; b <= last; ++b) needed[b - first] = 1;
  });
}

std::optional<ChunkBlocks> blocks_of(const Metadata& metadata, uint32_t tensor, uint32_t chunk,
                                     uint32_t copy) {
  const StoredTensor& stored = metadata.tensors[tensor];
  const StoredChunk& part = stored.chunks[chunk];
  const ItemLocation& at = metadata.place(tensor, chunk, copy);
  if (!at.checksums || at.codec != Codec::kNone || part.flat || stored.fortran_order) {
    return std::nullopt;
  }
  ChunkBlocks blocks;
  blocks.shape = stored.chunk_shape ? *stored.chunk_shape : part.box.shape;
  blocks.itemsize = itemsize(stored.dtype);
  blocks.bytes =
      checked_mul(static_cast<uint64_t>(numel(blocks.shape)), blocks.itemsize, "bytes of a chunk");
  blocks.begin = at.checksums->payload_offset;
  const auto fail = [&](const char* problem) {
    throw Error(ErrorCode::kCorrupt, problem)
        .with_key(stored.key)
        .with_file(metadata.files[at.file]);
  };
  if (const BlockSums* const sums = at.checksums->blocks.get()) {
    if (sums->bytes != blocks.bytes)
      fail("the recorded blocks are not those of the tensor's chunk");
    blocks.block_bytes = sums->block_bytes;
    blocks.expected = sums->crc32;
  } else {
    if (blocks.bytes > BlockSums::kLeastBlock) return std::nullopt;
    blocks.block_bytes = BlockSums::kLeastBlock;
    blocks.expected = {&at.checksums->payload_crc32, 1};
  }
  if (blocks.bytes == 0) return std::nullopt;
  if (blocks.begin > at.length || blocks.bytes > at.length - blocks.begin) {
    fail("a payload lies outside its item");
  }
  return blocks;
}

}  // namespace tilestone
