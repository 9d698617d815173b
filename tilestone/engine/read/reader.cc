// Chunks are read in the order of their place on disk. Each is cut into parts (see parts.cc). A
// RangeReader reads the parts in batches, so that their descriptions take little memory compared to
// the buffers.
//
// A chunk with blocks is read by whole blocks (block_reads.cc), and each block is checked. For
// other chunks: if the transfers of a chunk together want all of it, the chunk is read once, as a
// whole, and each part goes to every transfer that wants some of it. Only such chunks can be
// checked against their checksum: the parts tile the record in order, so their checksums combine to
// that of the record.
#include "tilestone/engine/read/reader_internal.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/block_reads_internal.h"
#include "tilestone/engine/read/deliver_internal.h"
#include "tilestone/engine/read/items_internal.h"
#include "tilestone/engine/read/lost_files_internal.h"
#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kMaxPart = 256u << 20;  // bytes; progress is reported part by part

// The transfers of one chunk: order[begin, end).
struct ReadGroup {
  ChunkRef chunk;
  size_t begin = 0;
  size_t end = 0;
  StoredPayload payload;
  bool whole = false;     // read once for all its transfers
  bool given_up = false;  // damaged, or the disk can't read it
  bool substitute = false;
  std::optional<ChunkBlocks> blocks = std::nullopt;  // if it is read by blocks
  bool exact = false;                                // its transfers were checked by another rank
  bool checked = false;  // all of its record is read, so the record's checksum is checked
  size_t record = 0;     // the first group of its record
};

// A part to be read, and the transfer that it is for; kAll: every transfer of the group.
struct Slice {
  static constexpr size_t kAll = ~size_t{0};
  size_t group = 0;
  size_t transfer = kAll;
  bool copied = false;  // the range reader puts its bytes, unchanged, into the target
  Part part;
  // Of a group with blocks, instead of a part; and the CRC-32s if it has more than one block.
  BlockRead read = {};
  std::vector<uint32_t> sums = {};
};

class TransferReader {
 public:
  TransferReader(const ReadContext& context, std::span<const Transfer> transfers,
                 ProgressMeter& progress)
      : context_(context),
        transfers_(transfers),
        progress_(progress),
        reader_(context, &context.threads) {}

  // A chunk that is damaged or unreadable at the place where it was read.
  struct Damaged {
    ChunkRef chunk;
    Error error;
    std::vector<Transfer> transfers;  // all that want some of it
  };

  // Returns the damaged chunks that have copies. Throws the error of a damaged chunk without
  // copies.
  std::vector<Damaged> run() {
    make_groups();
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (location(g).codec == Codec::kNone && !groups_[g].given_up) add_parts(g);
    }
    run_batch();
    finish_check();
    context_.threads.parallel_for(decoded_.size(), [&](size_t i) { decode(decoded_[i]); });
    return std::move(damaged_);
  }

 private:
  const StoredTensor& tensor(size_t g) const {
    return context_.metadata.tensors[groups_[g].chunk.tensor];
  }
  const StoredChunk& chunk(size_t g) const { return tensor(g).chunks[groups_[g].chunk.chunk]; }
  const ItemLocation& location(size_t g) const { return place_of(context_, groups_[g].chunk); }
  const Transfer& transfer(size_t at) const { return transfers_[order_[at]]; }

  void make_groups() {
    const auto at = [&](size_t i) -> const ItemLocation& {
      const Transfer& t = transfers_[i];
      return context_.metadata.place(t.tensor, t.chunk, t.copy);
    };
    const auto key = [&](size_t i) {
      return std::tuple(at(i).file, at(i).offset, transfers_[i].tensor, transfers_[i].chunk);
    };
    for (size_t i = 0; i < transfers_.size(); ++i) {
      if (!transfers_[i].box.empty()) order_.push_back(i);
    }
    const auto before = [&](size_t a, size_t b) { return key(a) < key(b); };
    if (!std::is_sorted(order_.begin(), order_.end(), before)) {
      std::sort(order_.begin(), order_.end(), before);
    }
    std::vector<ChunkRef> chunks;
    for (size_t i = 0; i < order_.size(); ++i) {
      const Transfer& t = transfer(i);
      const bool starts = i == 0 || transfer(i - 1).tensor != t.tensor ||
                          transfer(i - 1).chunk != t.chunk || transfer(i - 1).copy != t.copy;
      if (starts) {
        groups_.push_back({{t.tensor, t.chunk, t.copy}, i, i, {}});
        groups_.back().exact = true;
        chunks.push_back({t.tensor, t.chunk, t.copy});
      }
      groups_.back().end = i + 1;
      groups_.back().substitute |= t.substitute;
      groups_.back().exact &= t.checked;
    }
    find_items(chunks);
  }

  void find_items(const std::vector<ChunkRef>& chunks) {
    UnreadChunk unread;
    if (!context_.metadata.copies.empty()) {
      unread = [this](size_t g, const Error& error) { give_up(g, error); };
    }
    std::vector<StoredPayload> payloads = find_payloads(context_, chunks, unread);
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].given_up) continue;
      groups_[g].payload = std::move(payloads[g]);
      if (context_.verify_checksums && !groups_[g].exact) {
        groups_[g].blocks =
            blocks_of(context_.metadata, chunks[g].tensor, chunks[g].chunk, chunks[g].copy);
      }
      groups_[g].whole = !groups_[g].blocks && wants_whole(g);
      if (location(g).codec != Codec::kNone) decoded_.push_back(g);
    }
    for (size_t g = 0; g < groups_.size();) g = find_record(g);
    for (size_t g = 0; g < groups_.size(); ++g) note_unchecked(g);
  }

  void note_unchecked(size_t g) const {
    const ReadGroup& group = groups_[g];
    const bool in_part = !group.blocks && !group.whole && !group.exact && !group.given_up;
    if (!context_.verify_checksums || !in_part || location(g).codec != Codec::kNone) return;
    log_unchecked_parts(context_, group.chunk);
  }

  // Finds the groups from `first` on that are chunks of one item. If they are read whole and make
  // up all of the item, its record can be checked. Returns the group after them.
  size_t find_record(size_t first) {
    const uint32_t item = tensor(first).first_of_item(groups_[first].chunk.chunk);
    int64_t elements = 0;
    bool checked = context_.verify_checksums;
    size_t end = first;
    for (; end < groups_.size() && groups_[end].chunk.tensor == groups_[first].chunk.tensor &&
           tensor(end).first_of_item(groups_[end].chunk.chunk) == item;
         ++end) {
      const ReadGroup& group = groups_[end];
      elements += chunk(end).box.numel();
      checked = checked && group.whole && !group.exact && group.payload.record_crc32 &&
                fills_record(chunk(end), group.payload);
    }
    checked = checked && elements == numel(item_shape(chunk(first)));
    for (size_t g = first; g < end; ++g) {
      groups_[g].record = first;
      groups_[g].checked = checked;
    }
    return end;
  }

  bool wants_whole(size_t g) const {
    const ReadGroup& group = groups_[g];
    if (group.substitute) return true;
    const Box whole = Box::whole(chunk(g).box.shape);
    if (group.end - group.begin == 1) return transfer(group.begin).box == whole;
    std::vector<Box> boxes;
    for (size_t i = group.begin; i < group.end; ++i) boxes.push_back(transfer(i).box);
    return !find_uncovered(whole, boxes);
  }

  void add_parts(size_t g) {
    ReadGroup& group = groups_[g];
    if (group.blocks) return add_blocks(g);
    const uint64_t buffer = context_.buffers->buffer_bytes();
    if (group.whole) {
      uint64_t limit = buffer;
      for (size_t i = group.begin; i < group.end; ++i) {
        limit = std::min(limit, part_limit(transfer(i), group.payload.dtype, buffer));
      }
      const Box whole = Box::whole(group.payload.shape);
      const bool alone = group.end - group.begin == 1 && transfer(group.begin).box == whole;
      if (alone) limit = straight_limit(group, group.begin, limit);
      split(group.payload, whole, limit,
            [&](Part part) { add(g, alone ? group.begin : Slice::kAll, std::move(part)); });
      return;
    }
    for (size_t i = group.begin; i < group.end; ++i) {
      const uint64_t limit = part_limit(transfer(i), group.payload.dtype, buffer);
      split(group.payload, transfer(i).box, straight_limit(group, i, limit),
            [&](Part part) { add(g, i, std::move(part)); });
    }
  }

  void add_blocks(size_t g) {
    const ReadGroup& group = groups_[g];
    uint64_t limit = context_.buffers->buffer_bytes();
    std::vector<const Transfer*> transfers;
    for (size_t i = group.begin; i < group.end; ++i) {
      transfers.push_back(&transfer(i));
      limit = part_limit(transfer(i), group.payload.dtype, limit);
    }
    for (const BlockRead& read : plan_block_reads(*group.blocks, group.payload, transfers, limit)) {
      Slice& slice = slices_.emplace_back(Slice{g, Slice::kAll, read.target != nullptr, {}, read});
      const uint64_t size = read.end - read.begin;
      const uint64_t step = group.blocks->block_bytes;
      ByteRange range{.file = location(g).file,
                      .begin = location(g).offset + group.blocks->begin + read.begin,
                      .size = size,
                      .target = read.target,
                      .key = &tensor(g).key,
                      .summed = size <= step};
      if (size > step) {
        slice.sums.resize(block_count(size, step));
        range.block_crc32 = slice.sums.data();
        range.block_bytes = step;
      }
      reader_.add(range);
      if (reader_.full()) run_batch();
    }
  }

  // The part limit for a transfer, in bytes. It may be larger than a buffer if the transfer can be
  // read straight into its target.
  uint64_t straight_limit(const ReadGroup& group, size_t at, uint64_t limit) const {
    const Transfer& t = transfer(at);
    if (t.target.bytes() <= limit) return limit;
    const Part all{t.box, group.payload.offset, t.target.bytes()};
    return plain_target(group.payload, all, t) != nullptr ? std::max(limit, kMaxPart) : limit;
  }

  void add(size_t g, size_t at, Part part) {
    const ReadGroup& group = groups_[g];
    std::byte* target = nullptr;
    if (at != Slice::kAll) target = plain_target(group.payload, part, transfer(at));
    reader_.add({.file = location(g).file,
                 .begin = location(g).offset + part.offset,
                 .size = part.size,
                 .target = target,
                 .key = &tensor(g).key,
                 .summed = group.checked});
    slices_.push_back({g, at, target != nullptr, std::move(part)});
    if (reader_.full()) run_batch();
  }

  void run_batch() {
    RangeReader::Unread unread;
    if (!context_.metadata.copies.empty()) {
      unread = [this](size_t i, const Error& error) { give_up(slices_[i].group, error); };
    }
    const std::vector<ByteRange> ranges = reader_.read(
        [this](size_t i, ByteView bytes) { deliver_slice(slices_[i], bytes); }, unread);
    for (size_t i = 0; i < ranges.size(); ++i) check(slices_[i], ranges[i]);
    slices_.clear();
  }

  void deliver_slice(const Slice& slice, ByteView bytes) {
    const ReadGroup& group = groups_[slice.group];
    if (group.blocks) return deliver_blocks(group, slice, bytes);
    const bool all = slice.transfer == Slice::kAll;
    const size_t begin = all ? group.begin : slice.transfer;
    const size_t end = all ? group.end : slice.transfer + 1;
    for (size_t i = begin; i < end && !slice.copied; ++i) {
      put(group, slice.part, bytes, transfer(i));
    }
    if (group.substitute) return;
    progress_.add(static_cast<uint64_t>(slice.part.box.numel()) * itemsize(group.payload.dtype));
  }

  void deliver_blocks(const ReadGroup& group, const Slice& slice, ByteView bytes) {
    const auto count = [&](uint64_t delivered) {
      if (!group.substitute) progress_.add(delivered);
    };
    if (slice.copied) return count(bytes.size());
    const uint64_t first = group.blocks->begin + slice.read.begin;
    for_each_part(*group.blocks, slice.read.begin, slice.read.end, [&](const Part& part) {
      for (size_t i = group.begin; i < group.end; ++i) {
        const auto common = intersect(part.box, transfer(i).box);
        if (!common) continue;
        put(group, part, bytes.subspan(part.offset - first, part.size), transfer(i));
        count(static_cast<uint64_t>(common->numel()) * itemsize(group.payload.dtype));
      }
    });
  }

  void put(const ReadGroup& group, const Part& part, ByteView bytes, const Transfer& t) {
    deliver(group.payload, part, bytes, t, *context_.device_writes);
  }

  // Called with slices in the order of their groups, and of their offsets within a group.
  void check(const Slice& slice, const ByteRange& range) {
    const ReadGroup& group = groups_[slice.group];
    if (group.blocks) return check_blocks(slice, range);
    if (!group.checked) return;
    if (checking_ != group.record) finish_check();
    checking_ = group.record;
    sum_.add(sum_.size(), range.size, range.crc32);
  }

  void check_blocks(const Slice& slice, const ByteRange& range) {
    const ChunkBlocks& blocks = *groups_[slice.group].blocks;
    const uint64_t first = slice.read.begin / blocks.block_bytes;
    for (size_t i = 0; i < slice.sums.size(); ++i)
      check_block(slice.group, first + i, slice.sums[i]);
    if (!slice.sums.empty()) return;
    const bool starts = slice.read.begin == blocks.block_begin(first);
    block_sum_ = starts ? range.crc32 : crc32_combine(block_sum_, range.crc32, range.size);
    if (slice.read.end == blocks.block_end(first)) check_block(slice.group, first, block_sum_);
  }

  void check_block(size_t g, uint64_t block, uint32_t found) {
    if (groups_[g].given_up) return;
    try {
      expect_block(context_, groups_[g].chunk, *groups_[g].blocks, block, found);
    } catch (const Error& error) {
      give_up(g, error);
    }
  }

  void finish_check() {
    if (!checking_) return;
    const size_t g = *std::exchange(checking_, std::nullopt);
    const ReadGroup& group = groups_[g];
    const uint32_t found = std::exchange(sum_, {}).crc32();
    if (group.given_up) return;
    try {
      expect_record(context_, group.chunk, group.payload.record_size, *group.payload.record_crc32,
                    found);
    } catch (const Error& error) {
      give_up(g, error);
    }
  }

  // Gives up the group, and with it all groups of its record if the record is checked.
  void give_up(size_t g, const Error& error) {
    size_t begin = g, end = g + 1;
    if (groups_[g].checked) {
      begin = groups_[g].record;
      while (end < groups_.size() && groups_[end].record == begin) ++end;
    }
    for (size_t i = begin; i < end; ++i) {
      ReadGroup& group = groups_[i];
      if (std::exchange(group.given_up, true)) continue;
      if (context_.metadata.copies_of(group.chunk.tensor, group.chunk.chunk).empty()) throw error;
      Damaged& damaged = damaged_.emplace_back(Damaged{group.chunk, error, {}});
      for (size_t t = group.begin; t < group.end; ++t) damaged.transfers.push_back(transfer(t));
    }
  }

  void decode(size_t g) {
    try {
      read_decoded(g);
    } catch (const Error& error) {
      const bool elsewhere = error.code() == ErrorCode::kCorrupt || is_unreadable(error);
      if (!elsewhere || error.cause()) throw;
      const std::lock_guard lock(give_up_mutex_);
      give_up(g, error);
    }
  }

  // Reads and decodes a chunk that is compressed as a whole.
  void read_decoded(size_t g) {
    ReadGroup& group = groups_[g];
    const Bytes item =
        read_item(context_, location(g), tensor(g).key, decoded_limit(tensor(g), chunk(g)));
    group.payload = payload_in(context_, group.chunk, item);
    if (context_.verify_checksums && group.whole && group.payload.record_crc32) {
      const ByteView record =
          ByteView(item).subspan(group.payload.record_offset, group.payload.record_size);
      expect_record(context_, group.chunk, record.size(), *group.payload.record_crc32,
                    crc32(record));
    }
    for (size_t i = group.begin; i < group.end; ++i) {
      split(group.payload, transfer(i).box, UINT64_MAX, [&](Part part) {
        put(group, part, ByteView(item).subspan(part.offset, part.size), transfer(i));
      });
      if (group.substitute) continue;
      progress_.add(static_cast<uint64_t>(transfer(i).box.numel()) * itemsize(group.payload.dtype));
    }
  }

  const ReadContext& context_;
  const std::span<const Transfer> transfers_;
  ProgressMeter& progress_;
  std::vector<size_t> order_;  // of transfers, by place on disk
  std::vector<ReadGroup> groups_;
  std::vector<size_t> decoded_;  // groups that are compressed as a whole
  RangeReader reader_;
  std::vector<Slice> slices_;  // of the reader's batch
  std::vector<Damaged> damaged_;
  std::mutex give_up_mutex_;        // guards give_up() among the decoding threads
  std::optional<size_t> checking_;  // the first group of the record that sum_ belongs to
  RecordSum sum_;
  uint32_t block_sum_ = 0;  // of the block that is read in several pieces, so far
};

}  // namespace

std::vector<Transfer> transfers_of(const LoadPlan& plan, std::span<const TensorItem> items,
                                   const Metadata& metadata) {
  std::vector<Transfer> transfers;
  transfers.reserve(plan.reads.size());
  for (const ChunkRead& read : plan.reads) {
    const Piece& piece = items[read.item].pieces[read.piece];
    const Box& chunk = metadata.tensors[read.tensor].chunks[read.chunk].box;
    transfers.push_back({read.tensor, read.chunk, relative_to(read.box, chunk.offset),
                         narrow_to(piece.data, relative_to(read.box, piece.box.offset))});
  }
  return transfers;
}

uint64_t stored_bytes(const Metadata& metadata, std::span<const Transfer> transfers) {
  uint64_t bytes = 0;
  for (const Transfer& t : transfers) {
    bytes += static_cast<uint64_t>(t.box.numel()) * itemsize(metadata.tensors[t.tensor].dtype);
  }
  return bytes;
}

namespace {

// Places that were tried, by tensor and chunk.
using Tried = std::map<std::pair<uint32_t, uint32_t>, std::set<uint32_t>>;

// What is to be read again, from other places. Throws the error of a chunk that has none.
std::vector<Transfer> elsewhere(const ReadContext& context, LostFiles& lost, Tried& tried,
                                std::vector<TransferReader::Damaged>& damaged) {
  std::vector<Transfer> again;
  for (TransferReader::Damaged& chunk : damaged) {
    std::set<uint32_t>& places = tried[{chunk.chunk.tensor, chunk.chunk.chunk}];
    places.insert(chunk.chunk.copy);
    const std::optional<uint32_t> next =
        lost.place_besides(chunk.chunk.tensor, chunk.chunk.chunk, places);
    if (!next) throw chunk.error;
    warn_of_damage(chunk.error, context, chunk.chunk);
    for (Transfer& transfer : chunk.transfers) {
      transfer.copy = *next;
      transfer.substitute = true;
      transfer.checked = false;
      again.push_back(std::move(transfer));
    }
  }
  return again;
}

}  // namespace

void read_transfers(const ReadContext& context, std::span<const Transfer> transfers,
                    ProgressMeter& progress) {
  Tried tried;
  ProgressMeter silent({}, "read", 0);
  LostFiles lost(context);
  uint64_t to_devices = 0;
  for (const Transfer& t : transfers) {
    if (t.target.device != nullptr) to_devices += t.target.bytes();
    if (t.substitute) tried[{t.tensor, t.chunk}].insert(kNoCopy);
  }
  context.device_writes->expect(to_devices);
  context.device_writes->finish();  // what an exchange has delivered may be delivered again
  std::vector<Transfer> placed;
  if (!context.metadata.copies.empty()) {
    placed.assign(transfers.begin(), transfers.end());
    lost.avoid(placed);
    transfers = placed;
  }
  std::vector<TransferReader::Damaged> damaged = TransferReader(context, transfers, progress).run();
  context.device_writes->finish();
  while (!damaged.empty()) {
    const std::vector<Transfer> again = elsewhere(context, lost, tried, damaged);
    damaged = TransferReader(context, again, silent).run();
    context.device_writes->finish();
  }
}

}  // namespace tilestone::engine
