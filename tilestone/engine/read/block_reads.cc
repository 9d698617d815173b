#include "tilestone/engine/read/block_reads_internal.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/engine/read/deliver_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/geometry/box.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kMaxStraight = 256u << 20;  // bytes; progress is reported read by read
constexpr uint64_t kShortestRun = 16u << 10;   // bytes; shorter ones are copied
constexpr uint64_t kElementAlignment = 64;     // bytes; a multiple of every item size

// Bytes of the payload that go to memory unchanged.
struct StraightRun {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::byte* target = nullptr;
};

// Adds the transfer's runs. False if its elements have to be scattered or converted.
bool add_runs(const ChunkBlocks& blocks, const StoredPayload& payload, const Transfer& transfer,
              std::vector<StraightRun>& found) {
  const uint64_t size = run_bytes(blocks, transfer.box, 1);
  const auto bytes = static_cast<uint64_t>(transfer.box.numel()) * blocks.itemsize;
  if (size < kShortestRun && size != bytes) return false;
  const size_t before = found.size();
  bool plain = true;
  for_each_run(blocks, transfer.box, 1, [&](const ChunkRun& run) {
    if (!plain) return;
    std::byte* const target =
        plain_target(payload, {run.box, blocks.begin + run.offset, run.size}, transfer);
    plain = target != nullptr;
    found.push_back({run.offset, run.offset + run.size, target});
  });
  if (!plain) found.resize(before);
  return plain;
}

// Joins runs that follow one another in the payload and in memory. None are left if two overlap:
// then several transfers want the same bytes.
void join_runs(std::vector<StraightRun>& runs) {
  std::sort(runs.begin(), runs.end(),
            [](const StraightRun& a, const StraightRun& b) { return a.begin < b.begin; });
  std::vector<StraightRun> joined;
  for (const StraightRun& run : runs) {
    StraightRun* const last = joined.empty() ? nullptr : &joined.back();
    if (last != nullptr && run.begin < last->end) return runs.clear();
    if (last != nullptr && run.begin == last->end &&
        run.target == last->target + (last->end - last->begin)) {
      last->end = run.end;
    } else {
      joined.push_back(run);
    }
  }
  runs = std::move(joined);
}

}  // namespace

std::vector<BlockRead> plan_block_reads(const ChunkBlocks& blocks, const StoredPayload& payload,
                                        std::span<const Transfer* const> transfers,
                                        uint64_t max_buffered) {
  const uint64_t count = blocks.expected.size();
  std::vector<char> needed(count, 0), scattered(count, 0);
  std::vector<StraightRun> runs;
  for (const Transfer* transfer : transfers) {
    mark_blocks(blocks, transfer->box, needed);
    if (!add_runs(blocks, payload, *transfer, runs)) mark_blocks(blocks, transfer->box, scattered);
  }
  join_runs(runs);
  std::vector<BlockRead> reads;
  const uint64_t step = max_buffered / kElementAlignment * kElementAlignment;
  size_t run = 0;
  for (uint64_t b = 0; b < count; ++b) {
    if (!needed[b]) continue;
    const uint64_t begin = blocks.block_begin(b), end = blocks.block_end(b);
    while (run < runs.size() && runs[run].end < end) ++run;
    if (!scattered[b] && run < runs.size() && runs[run].begin <= begin) {
      std::byte* const target = runs[run].target + (begin - runs[run].begin);
      BlockRead* const last = reads.empty() ? nullptr : &reads.back();
      if (last != nullptr && last->target != nullptr && last->end == begin &&
          last->target + (begin - last->begin) == target && end - last->begin <= kMaxStraight) {
        last->end = end;
      } else {
        reads.push_back({begin, end, target});
      }
      continue;
    }
    for (uint64_t at = begin; at < end; at += step) {
      reads.push_back({at, std::min(end, at + step), nullptr});
    }
  }
  return reads;
}

void for_each_part(const ChunkBlocks& blocks, uint64_t begin, uint64_t end,
                   const std::function<void(const Part&)>& visit) {
  const FlatRange range{static_cast<int64_t>(begin / blocks.itemsize),
                        static_cast<int64_t>(end / blocks.itemsize)};
  uint64_t at = begin;
  for (Box& box : flat_range_to_boxes(blocks.shape, range)) {
    const uint64_t size = static_cast<uint64_t>(box.numel()) * blocks.itemsize;
    visit({std::move(box), blocks.begin + at, size});
    at += size;
  }
}

void expect_block(const ReadContext& context, ChunkRef chunk, const ChunkBlocks& blocks,
                  uint64_t block, uint32_t found) {
  const uint32_t expected = blocks.expected[block];
  if (found == expected) return;
  const uint64_t first = place_of(context, chunk).offset + blocks.begin;
  const uint64_t begin = first + blocks.block_begin(block), end = first + blocks.block_end(block);
  fail_chunk(context, chunk,
             "is damaged: expected CRC-32 " + std::to_string(expected) + " of the bytes [" +
                 std::to_string(begin) + ", " + std::to_string(end) + ") of the file, found " +
                 std::to_string(found));
}

std::vector<uint64_t> damaged_blocks(const ReadContext& context, ChunkRef chunk,
                                     const ChunkBlocks& blocks) {
  const ItemLocation& at = place_of(context, chunk);
  const uint64_t step = context.buffers->buffer_bytes();
  RangeReader reader(context, &context.threads);
  std::vector<uint64_t> damaged;
  std::vector<uint64_t> block_of;  // by range
  std::vector<uint32_t> found(blocks.expected.size(), 0);
  const auto read_batch = [&] {
    const std::vector<ByteRange> ranges = reader.read();
    for (size_t i = 0; i < ranges.size(); ++i) {
      uint32_t& crc = found[block_of[i]];
      crc = crc32_combine(crc, ranges[i].crc32, ranges[i].size);
    }
    block_of.clear();
  };
  for (uint64_t b = 0; b < found.size(); ++b) {
    const uint64_t end = blocks.block_end(b);
    for (uint64_t begin = blocks.block_begin(b); begin < end; begin += step) {
      block_of.push_back(b);
      reader.add({.file = at.file,
                  .begin = at.offset + blocks.begin + begin,
                  .size = std::min(step, end - begin),
                  .summed = true});
      if (reader.full()) read_batch();
    }
  }
  read_batch();
  for (uint64_t b = 0; b < found.size(); ++b) {
    if (found[b] != blocks.expected[b]) damaged.push_back(b);
  }
  return damaged;
}

}  // namespace tilestone::engine
