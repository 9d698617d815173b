// Chunks are taken in the order of their place on disk. Each is cut into parts (see parts.cc); a
// part becomes a read operation, or joins the one before it when the two are near; operations are
// run in batches, so that what describes them stays small beside the buffers.
//
// A chunk whose transfers together want all of it is read once, as a whole, and each part goes to
// every transfer that wants some of it. Only such chunks can be checked against their checksum:
// the parts tile the record in order, so their checksums combine to the record's.
#include "tilestone/engine/read/reader_internal.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/deliver_internal.h"
#include "tilestone/engine/read/items_internal.h"
#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone::engine {
namespace {

constexpr size_t kBatchParts = 16384;
constexpr size_t kBatchFiles = 128;  // open at once
// Parts from kStraight bytes on are read into their targets, without their neighbours; smaller
// ones, down to kStraightAlone, where they have no near neighbours.
constexpr uint64_t kStraight = 128u << 10;
constexpr uint64_t kStraightAlone = 2u << 10;
constexpr uint64_t kStraightMost = 256u << 20;  // of one part; progress is told part by part

// The transfers of one chunk: order[begin, end).
struct Group {
  ChunkRef chunk;
  size_t begin = 0;
  size_t end = 0;
  StoredPayload payload;
  bool whole = false;    // read once for all
  bool checked = false;  // its record's checksum will be known
  size_t record = 0;     // the first group of those that make up its record
};

// A part on its way. `transfer`: the one it is for, or kAll of the group.
struct Slice {
  static constexpr size_t kAll = ~size_t{0};
  size_t group = 0;
  size_t transfer = kAll;
  bool straight = false;        // read to `target` by an operation of its own
  std::byte* target = nullptr;  // where the bytes go as they are; null: deliver() spreads them
  Part part;
  uint64_t begin = 0;  // in the file
  uint32_t crc = 0;
};

// A read, for slices[first, first + count).
struct Op {
  uint32_t file = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  size_t first = 0;
  size_t count = 0;
  std::byte* target = nullptr;
};

class TransferReader {
 public:
  TransferReader(const ReadContext& context, std::span<const Transfer> transfers,
                 ProgressMeter& progress)
      : context_(context), transfers_(transfers), progress_(progress) {}

  void run() {
    make_groups();
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (location(g).codec == Codec::kNone) add_parts(g);
    }
    run_batch();
    finish_check();
    context_.threads.parallel_for(decoded_.size(), [&](size_t i) { read_decoded(decoded_[i]); });
  }

 private:
  const StoredTensor& tensor(size_t g) const {
    return context_.metadata.tensors[groups_[g].chunk.tensor];
  }
  const StoredChunk& chunk(size_t g) const { return tensor(g).chunks[groups_[g].chunk.chunk]; }
  const ItemLocation& location(size_t g) const { return chunk(g).at; }
  const std::string& file_name(size_t g) const { return context_.metadata.files[location(g).file]; }
  const Transfer& transfer(size_t place) const { return transfers_[order_[place]]; }

  void make_groups() {
    const auto at = [&](size_t i) -> const ItemLocation& {
      const Transfer& t = transfers_[i];
      return context_.metadata.tensors[t.tensor].chunks[t.chunk].at;
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
    for (size_t place = 0; place < order_.size(); ++place) {
      const Transfer& t = transfer(place);
      const bool starts = place == 0 || transfer(place - 1).tensor != t.tensor ||
                          transfer(place - 1).chunk != t.chunk;
      if (starts) {
        groups_.push_back({{t.tensor, t.chunk}, place, place, {}});
        chunks.push_back({t.tensor, t.chunk});
      }
      groups_.back().end = place + 1;
    }
    std::vector<StoredPayload> payloads = find_payloads(context_, chunks);
    for (size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].payload = std::move(payloads[g]);
      groups_[g].whole = wants_whole(g);
      if (location(g).codec != Codec::kNone) decoded_.push_back(g);
    }
    for (size_t g = 0; g < groups_.size();) g = find_record(g);
  }

  // The groups from `first` on that are chunks of one item: where they are read whole and are all
  // of it, its record's checksum will be known. Returns the group behind them.
  size_t find_record(size_t first) {
    const uint32_t item = tensor(first).first_of_item(groups_[first].chunk.chunk);
    int64_t elements = 0;
    bool checked = context_.verify_checksums;
    size_t end = first;
    for (; end < groups_.size() && groups_[end].chunk.tensor == groups_[first].chunk.tensor &&
           tensor(end).first_of_item(groups_[end].chunk.chunk) == item;
         ++end) {
      const Group& group = groups_[end];
      elements += chunk(end).box.numel();
      checked = checked && group.whole && group.payload.record_crc32 &&
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
    const Group& group = groups_[g];
    const Box whole = Box::whole(chunk(g).box.shape);
    if (group.end - group.begin == 1) return transfer(group.begin).box == whole;
    std::vector<Box> boxes;
    for (size_t i = group.begin; i < group.end; ++i) boxes.push_back(transfer(i).box);
    return !find_uncovered(whole, boxes);
  }

  void add_parts(size_t g) {
    Group& group = groups_[g];
    if (!try_add(location(g).offset, location(g).length)) fail(g, "has an impossible offset");
    const uint64_t buffer = context_.buffers->buffer_bytes();
    if (group.whole) {
      uint64_t limit = buffer;
      for (size_t i = group.begin; i < group.end; ++i) {
        limit = std::min(limit, part_limit(transfer(i), group.payload.dtype, buffer));
      }
      const bool alone = group.end - group.begin == 1;
      if (alone) limit = straight_limit(group, group.begin, limit);
      split(group.payload, Box::whole(group.payload.shape), limit,
            [&](Part part) { add(g, alone ? group.begin : Slice::kAll, std::move(part)); });
      return;
    }
    for (size_t i = group.begin; i < group.end; ++i) {
      const uint64_t limit = part_limit(transfer(i), group.payload.dtype, buffer);
      split(group.payload, transfer(i).box, straight_limit(group, i, limit),
            [&](Part part) { add(g, i, std::move(part)); });
    }
  }

  // A transfer that can be read straight into its target needs no buffer.
  uint64_t straight_limit(const Group& group, size_t place, uint64_t limit) const {
    const Transfer& t = transfer(place);
    if (t.target.bytes() <= limit) return limit;
    const Part all{t.box, group.payload.offset, t.target.bytes()};
    return plain_target(group.payload, all, t) != nullptr ? std::max(limit, kStraightMost) : limit;
  }

  void add(size_t g, size_t place, Part part) {
    const Group& group = groups_[g];
    Slice slice{g, place, false, nullptr, std::move(part), 0, 0};
    slice.begin = location(g).offset + slice.part.offset;
    if (place != Slice::kAll) {
      slice.target = plain_target(group.payload, slice.part, transfer(place));
    }
    slice.straight = slice.target != nullptr && slice.part.size >= kStraight;
    slices_.push_back(std::move(slice));
    open_files_.insert(location(g).file);
    if (slices_.size() >= kBatchParts || open_files_.size() >= kBatchFiles) run_batch();
  }

  std::vector<Op> make_ops() {
    const uint64_t buffer = context_.buffers->buffer_bytes();
    const uint64_t near = context_.storage.read_costs().gap_bytes;
    std::vector<Op> ops;
    for (size_t i = 0; i < slices_.size(); ++i) {
      const Slice& slice = slices_[i];
      const uint32_t file = location(slice.group).file;
      const uint64_t end = slice.begin + slice.part.size;
      if (!slice.straight && !ops.empty()) {
        Op& last = ops.back();
        const bool open = !slices_[last.first].straight;
        if (open && last.file == file && slice.begin >= last.begin &&
            slice.begin <= last.end + near && std::max(end, last.end) - last.begin <= buffer) {
          last.end = std::max(last.end, end);
          ++last.count;
          continue;
        }
      }
      ops.push_back({file, slice.begin, end, i, 1, nullptr});
    }
    for (Op& op : ops) {
      Slice& slice = slices_[op.first];
      const bool alone = op.count == 1 && slice.part.size >= kStraightAlone;
      if (alone) slice.straight = slice.target != nullptr;
      if (slice.straight) op.target = slice.target;
    }
    return ops;
  }

  void run_batch() {
    const std::vector<Op> ops = make_ops();
    std::map<uint32_t, std::unique_ptr<ReadableFile>> files;
    std::vector<ReadOp> reads;
    reads.reserve(ops.size());
    for (const Op& op : ops) {
      auto& file = files[op.file];
      if (!file) file = open(op);
      reads.push_back({file.get(), op.begin, op.end - op.begin, op.target});
      Slice& first = slices_[op.first];
      if (op.target != nullptr && groups_[first.group].checked) reads.back().crc32 = &first.crc;
    }
    const ReadOptions options{&context_.threads, context_.buffers, context_.deadline,
                              context_.cache};
    context_.storage.read(reads, options, [&](size_t i, ByteView bytes) {
      const Op& op = ops[i];
      for (size_t s = op.first; s < op.first + op.count; ++s) {
        Slice& slice = slices_[s];
        take(slice, bytes.subspan(slice.begin - op.begin, slice.part.size));
      }
    });
    for (const Slice& slice : slices_) check(slice);
    slices_.clear();
    open_files_.clear();
  }

  std::unique_ptr<ReadableFile> open(const Op& op) const {
    try {
      return open_data(context_, op.file);
    } catch (...) {
      throw current_error().with_key(tensor(slices_[op.first].group).key);
    }
  }

  void take(Slice& slice, ByteView bytes) {
    const Group& group = groups_[slice.group];
    if (slice.target != nullptr && !slice.straight) {
      copy(slice, bytes);
    } else if (group.checked && !slice.straight) {
      slice.crc = crc32(bytes);
    }
    if (slice.transfer != Slice::kAll) {
      if (slice.target == nullptr) put(group, slice, bytes, transfer(slice.transfer));
    } else {
      for (size_t i = group.begin; i < group.end; ++i) put(group, slice, bytes, transfer(i));
    }
    progress_.add(static_cast<uint64_t>(slice.part.box.numel()) * itemsize(group.payload.dtype));
  }

  void copy(Slice& slice, ByteView bytes) const {
    if (groups_[slice.group].checked) {
      slice.crc = copy_crc32({slice.target, bytes.size()}, bytes);
    } else {
      std::memcpy(slice.target, bytes.data(), bytes.size());
    }
  }

  void put(const Group& group, const Slice& slice, ByteView bytes, const Transfer& t) {
    if (t.target.device == nullptr) return deliver(group.payload, slice.part, bytes, t);
    std::lock_guard lock(device_);
    deliver(group.payload, slice.part, bytes, t);
  }

  // Slices come in the order of their groups, and of their offsets within one.
  void check(const Slice& slice) {
    const Group& group = groups_[slice.group];
    if (!group.checked) return;
    if (!checking_ || *checking_ != group.record) {
      finish_check();
      checking_ = group.record;
      crc_ = 0;
    }
    crc_ = crc32_combine(crc_, slice.crc, slice.part.size);
  }

  void finish_check() {
    if (!checking_) return;
    const size_t g = *std::exchange(checking_, std::nullopt);
    if (crc_ != *groups_[g].payload.record_crc32) {
      fail(g, "is damaged: expected CRC-32 " + std::to_string(*groups_[g].payload.record_crc32) +
                  " of its " + std::to_string(groups_[g].payload.record_size) +
                  " bytes of elements, found " + std::to_string(crc_));
    }
  }

  // A chunk that is compressed as a whole.
  void read_decoded(size_t g) {
    Group& group = groups_[g];
    const Bytes item =
        read_item(context_, location(g), tensor(g).key, decoded_limit(tensor(g), chunk(g)));
    group.payload = payload_in(context_, group.chunk, item);
    if (context_.verify_checksums && group.whole && group.payload.record_crc32) {
      const ByteView record =
          ByteView(item).subspan(group.payload.record_offset, group.payload.record_size);
      if (crc32(record) != *group.payload.record_crc32) fail(g, "is damaged: wrong CRC-32");
    }
    for (size_t i = group.begin; i < group.end; ++i) {
      split(group.payload, transfer(i).box, UINT64_MAX, [&](Part part) {
        Slice slice{g, i, false, nullptr, std::move(part), 0, 0};
        put(group, slice, ByteView(item).subspan(slice.part.offset, slice.part.size), transfer(i));
      });
      progress_.add(static_cast<uint64_t>(transfer(i).box.numel()) * itemsize(group.payload.dtype));
    }
  }

  [[noreturn]] void fail(size_t g, const std::string& problem) const {
    throw Error(ErrorCode::kCorrupt,
                "the item at offset " + std::to_string(location(g).offset) + " " + problem)
        .with_key(tensor(g).key)
        .with_file(file_name(g));
  }

  const ReadContext& context_;
  const std::span<const Transfer> transfers_;
  ProgressMeter& progress_;
  std::vector<size_t> order_;  // of transfers, by place on disk
  std::vector<Group> groups_;
  std::vector<size_t> decoded_;  // groups that are compressed as a whole
  std::vector<Slice> slices_;    // of the batch that is being made
  std::set<uint32_t> open_files_;
  std::mutex device_;
  std::optional<size_t> checking_;  // the first group of the record that crc_ belongs to
  uint32_t crc_ = 0;
};

}  // namespace

uint64_t stored_bytes(const Metadata& metadata, std::span<const Transfer> transfers) {
  uint64_t bytes = 0;
  for (const Transfer& t : transfers) {
    bytes += static_cast<uint64_t>(t.box.numel()) * itemsize(metadata.tensors[t.tensor].dtype);
  }
  return bytes;
}

void read_transfers(const ReadContext& context, std::span<const Transfer> transfers,
                    ProgressMeter& progress) {
  TransferReader(context, transfers, progress).run();
}

}  // namespace tilestone::engine
