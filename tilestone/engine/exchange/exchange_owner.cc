#include "tilestone/engine/exchange/exchange_owner_internal.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/block_reads_internal.h"
#include "tilestone/engine/read/deliver_internal.h"
#include "tilestone/engine/read/lost_files_internal.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kPartAlignment = 64;  // bytes; a multiple of every item size

bool is_c_order(const StoredPayload& payload) {
  return StridedView{nullptr, payload.shape, payload.strides, itemsize(payload.dtype)}
      .is_contiguous();
}

}  // namespace

TileOwner::TileOwner(const ReadContext& context, const StripeOwners& owners, int world)
    : context_(context), owners_(owners), world_(static_cast<size_t>(world)) {}

const StoredTensor& TileOwner::tensor_of(const ServedTile& served) const {
  return context_.metadata.tensors[served.tensor];
}
const StoredChunk& TileOwner::chunk_of(const ServedTile& served) const {
  return tensor_of(served).chunks[served.chunk];
}

std::vector<Bytes> TileOwner::decide(const std::vector<Bytes>& requests) {
  Verdicts verdicts(world_);
  group(requests, verdicts);
  find_payloads_of_chunks(verdicts);
  std::vector<Bytes> messages;
  for (const std::vector<bool>& served : verdicts) {
    messages.push_back(encode_verdicts(served, more()));
  }
  return messages;
}

void TileOwner::group(const std::vector<Bytes>& requests, Verdicts& verdicts) {
  std::map<std::tuple<uint32_t, uint32_t, uint64_t>, size_t> tile_numbers;  // by chunk and tile
  std::vector<ServedTile> tiles;
  for (size_t r = 0; r < requests.size(); ++r) {
    const auto rank = static_cast<int>(r);
    const std::vector<TileRequest> asked = decode_requests(requests[r], rank);
    verdicts[r].resize(asked.size(), false);
    for (uint32_t i = 0; i < asked.size(); ++i) {
      const TileRequest& request = asked[i];
      const std::vector<StoredTensor>& tensors = context_.metadata.tensors;
      if (request.tensor >= tensors.size() ||
          request.chunk >= tensors[request.tensor].chunks.size()) {
        fail_exchange(rank, "a rank requested a chunk that the checkpoint doesn't have");
      }
      const StoredTensor& tensor = tensors[request.tensor];
      const Dims& shape = tensor.chunks[request.chunk].box.shape;
      check_bounds(request.box, shape);
      if (request.box.empty()) fail_exchange(rank, "a rank requested an empty box");
      std::optional<ChunkBlocks> blocks =
          blocks_of(context_.metadata, request.tensor, request.chunk);
      const auto add = [&](const Tile& tile) {
        const auto [number, is_new] =
            tile_numbers.try_emplace({request.tensor, request.chunk, tile.offset}, tiles.size());
        if (is_new) tiles.push_back({request.tensor, request.chunk, tile, {}, {}, blocks});
        tiles[number->second].asked.push_back({r, i, request.box, request.checked_by_asker});
      };
      if (blocks) {
        const uint64_t bytes = tile_bytes(*blocks, owners_.stripe_bytes());
        for_each_block_tile(*blocks, bytes, request.box,
                            [&](uint64_t tile, const Box&) { add({{}, tile * bytes}); });
      } else {
        for_each_tile(shape, itemsize(tensor.dtype), owners_.stripe_bytes(), request.box, add);
      }
    }
  }
  judge(tiles, verdicts);
}

void TileOwner::judge(std::vector<ServedTile>& tiles, Verdicts& verdicts) {
  const uint64_t request_bytes = context_.storage.facts().read_costs.request_bytes;
  LostFiles lost(context_);
  for (ServedTile& tile : tiles) {
    if (lost.place_of_chunk(tile.tensor, tile.chunk, kNoCopy) != kNoCopy) continue;
    if (!is_worth_it(tile, request_bytes)) continue;
    for (const ServedTile::AskedBox& asked : tile.asked) {
      verdicts[asked.rank][asked.request] = true;
    }
    served_.push_back(std::move(tile));
  }
}

bool TileOwner::is_worth_it(const ServedTile& tile, uint64_t request_bytes) const {
  const uint64_t size = itemsize(tensor_of(tile).dtype);
  if (!tile.blocks || !context_.verify_checksums) {
    std::vector<Box> boxes;
    bool several = false;  // ranks; one rank may have several boxes in a tile with blocks
    for (const ServedTile::AskedBox& asked : tile.asked) {
      boxes.push_back(asked.box);
      several = several || asked.rank != tile.asked.front().rank;
    }
    if (tile.blocks && !several) return false;
    return worth_exchanging(chunk_of(tile).box.shape, size, boxes, request_bytes);
  }
  const ChunkBlocks& blocks = *tile.blocks;
  const uint64_t tile_end =
      std::min(tile.tile.offset + tile_bytes(blocks, owners_.stripe_bytes()), blocks.bytes);
  const uint64_t count = block_count(tile_end - tile.tile.offset, blocks.block_bytes);
  std::map<size_t, std::vector<char>> needed;  // by rank
  uint64_t wanted = 0;
  for (const ServedTile::AskedBox& asked : tile.asked) {
    std::vector<char>& of_rank = needed.try_emplace(asked.rank, count, 0).first->second;
    mark_blocks(blocks, asked.box, of_rank, tile.tile.offset / blocks.block_bytes);
    wanted += static_cast<uint64_t>(asked.box.numel()) * size;
  }
  std::vector<std::vector<char>> by_rank;
  for (auto& [rank, of_rank] : needed) by_rank.push_back(std::move(of_rank));
  return worth_exchanging_blocks(blocks.block_bytes, by_rank, wanted, request_bytes);
}

void TileOwner::find_payloads_of_chunks(Verdicts& verdicts) {
  std::sort(served_.begin(), served_.end(), [&](const ServedTile& a, const ServedTile& b) {
    const ItemLocation& x = chunk_of(a).at;
    const ItemLocation& y = chunk_of(b).at;
    return std::tuple(x.file, x.offset, a.tensor, a.chunk, a.tile.offset) <
           std::tuple(y.file, y.offset, b.tensor, b.chunk, b.tile.offset);
  });
  std::vector<ChunkRef> chunks;
  std::vector<size_t> chunk_index;
  for (size_t i = 0; i < served_.size(); ++i) {
    const bool same = i > 0 && served_[i].tensor == served_[i - 1].tensor &&
                      served_[i].chunk == served_[i - 1].chunk;
    if (!same) chunks.push_back({served_[i].tensor, served_[i].chunk});
    chunk_index.push_back(chunks.size() - 1);
  }
  std::set<size_t> unread;
  UnreadChunk on_unreadable;
  if (!context_.metadata.copies.empty()) {
    on_unreadable = [&](size_t i, const Error& error) {
      if (context_.metadata.copies_of(chunks[i].tensor, chunks[i].chunk).empty()) throw error;
      unread.insert(i);
    };
  }
  const std::vector<StoredPayload> payloads = find_payloads(context_, chunks, on_unreadable);
  std::vector<ServedTile> served;
  for (size_t i = 0; i < served_.size(); ++i) {
    if (unread.contains(chunk_index[i])) {
      for (const ServedTile::AskedBox& asked : served_[i].asked) {
        verdicts[asked.rank][asked.request] = false;
      }
      continue;
    }
    served_[i].payload = payloads[chunk_index[i]];
    served.push_back(std::move(served_[i]));
  }
  served_ = std::move(served);
}

// Cuts the next tile into parts, in the order of their place on disk.
void TileOwner::cut_next(uint64_t pair_bytes) {
  const ServedTile& served = served_[next_];
  // The askers may convert a part or copy it to a device.
  const uint64_t part_bytes =
      std::min({pair_bytes, kMaxTemporary, uint64_t{context_.buffers->buffer_bytes()}});
  if (served.blocks && context_.verify_checksums) return cut_blocks(served, part_bytes);
  std::vector<Box> boxes;
  for (const ServedTile::AskedBox& asked : served.asked) boxes.push_back(asked.box);
  boxes = merged_boxes(boxes);
  for (const Box& box : boxes) {
    split(served.payload, box, part_bytes, [&](Part part) { parts_.push_back({std::move(part)}); });
  }
  if (boxes.size() > 1) {
    std::stable_sort(parts_.begin(), parts_.end(), [](const CutPart& a, const CutPart& b) {
      return a.part.offset < b.part.offset;
    });
  }
  const bool checked = context_.verify_checksums && served.payload.record_crc32 &&
                       fills_record(chunk_of(served), served.payload) &&
                       is_c_order(served.payload) && boxes.size() == 1 &&
                       boxes.front() == served.tile.box;
  for (CutPart& cut : parts_) cut.checked = checked;
  const bool in_part = boxes.size() != 1 || boxes.front() != served.tile.box;
  if (in_part && context_.verify_checksums) {
    log_unchecked_parts(context_, {served.tensor, served.chunk});
  }
}

// All of each block that has requested elements, also what nobody wants.
void TileOwner::cut_blocks(const ServedTile& served, uint64_t part_bytes) {
  const ChunkBlocks& blocks = *served.blocks;
  const uint64_t first = served.tile.offset / blocks.block_bytes;
  std::vector<char> needed(
      std::min<uint64_t>(blocks.expected.size() - first,
                         tile_bytes(blocks, owners_.stripe_bytes()) / blocks.block_bytes));
  std::vector<char> checked = needed;
  for (const ServedTile::AskedBox& asked : served.asked) {
    mark_blocks(blocks, asked.box, needed, first);
    if (!asked.checked_by_asker) mark_blocks(blocks, asked.box, checked, first);
  }
  const uint64_t step = part_bytes / kPartAlignment * kPartAlignment;
  for (uint64_t b = first; b < first + needed.size(); ++b) {
    if (!needed[b - first]) continue;
    const uint64_t end = blocks.block_end(b);
    for (uint64_t at = blocks.block_begin(b); at < end; at += step) {
      for_each_part(blocks, at, std::min(end, at + step),
                    [&](const Part& part) { parts_.push_back({part, checked[b - first] != 0}); });
    }
  }
}

void TileOwner::check_blocks(const TileRound& round, std::span<const ByteRange> ranges) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    const ServedTile& served = tile(round.parts[i].tile);
    if (!ranges[i].summed || !served.blocks) continue;
    const ChunkBlocks& blocks = *served.blocks;
    const uint64_t begin = round.parts[i].part.offset - blocks.begin;
    const uint64_t block = begin / blocks.block_bytes;
    const bool starts = begin == blocks.block_begin(block);
    block_sum_ =
        starts ? ranges[i].crc32 : crc32_combine(block_sum_, ranges[i].crc32, ranges[i].size);
    if (begin + ranges[i].size != blocks.block_end(block)) continue;
    const ChunkRef chunk{served.tensor, served.chunk};
    if (given_up_.contains({chunk.tensor, chunk.chunk})) continue;
    try {
      expect_block(context_, chunk, blocks, block, block_sum_);
    } catch (const Error& error) {
      give_up(chunk, error);
    }
  }
}

void TileOwner::give_up(ChunkRef chunk, const Error& error) {
  if (context_.metadata.copies_of(chunk.tensor, chunk.chunk).empty()) throw error;
  if (given_up_.emplace(chunk.tensor, chunk.chunk).second) warn_of_damage(error, context_, chunk);
}

// Adds the part to the round. False if the round has no room for it.
bool TileOwner::schedule(TileRound& round, const CutPart& cut, uint64_t pair_bytes) {
  const Part& part = cut.part;
  const ServedTile& served = served_[next_];
  const size_t first = round.packed.size();
  bool fits =
      round.parts.size() < RangeReader::kMaxRanges && round.files.size() < RangeReader::max_files();
  for (const ServedTile::AskedBox& asked : served.asked) {
    const auto common = intersect(part.box, asked.box);
    if (!common) continue;
    uint64_t& filled = round.filled[asked.rank];
    round.packed.push_back({asked.rank, {asked.request, *common}, filled});
    filled += static_cast<uint64_t>(common->numel()) * itemsize(served.payload.dtype);
    fits = fits && filled <= pair_bytes;
  }
  if (!fits && !round.parts.empty()) {
    for (size_t i = round.packed.size(); i-- > first;) {
      round.filled[round.packed[i].rank] = round.packed[i].at;
    }
    round.packed.resize(first);
    return false;
  }
  round.parts.push_back({next_, part, first, round.packed.size() - first,
                         next_part_ + 1 == parts_.size(), cut.checked});
  round.files.insert(chunk_of(served).at.file);
  return true;
}

ByteRange TileOwner::range_of(const TileRound::Loaded& loaded) const {
  const ServedTile& served = tile(loaded.tile);
  const ItemLocation& at = chunk_of(served).at;
  return {.file = at.file,
          .begin = at.offset + loaded.part.offset,
          .size = loaded.part.size,
          .key = &tensor_of(served).key,
          .summed = loaded.checked};
}

TileRound TileOwner::plan_round(uint64_t pair_bytes) {
  TileRound round;
  round.filled.assign(world_, 0);
  while (more()) {
    if (parts_.empty()) cut_next(pair_bytes);
    for (; next_part_ < parts_.size(); ++next_part_) {
      if (!schedule(round, parts_[next_part_], pair_bytes)) return round;
    }
    ++next_;
    parts_.clear();
    next_part_ = 0;
  }
  return round;
}

}  // namespace tilestone::engine
