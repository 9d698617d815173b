#include "tilestone/engine/exchange/exchange_owner_internal.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <tuple>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/deliver_internal.h"
#include "tilestone/engine/read/payloads_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kLeastPair = 64u << 10;   // bytes of a message that are always allowed
constexpr uint64_t kLargestPart = 1u << 20;  // bytes: a detour on the way to a device's memory
constexpr uint64_t kJoinGap = 3072;          // bytes between parts that are read as one
constexpr size_t kRoundParts = 16384;
constexpr size_t kSlotDescription = 48;       // bytes, about
constexpr uint64_t kCachedRound = 8u << 20;   // bytes that an owner asks the page cache for at once
constexpr uint64_t kLeastFetched = 4u << 20;  // bytes from the disk that are worth a round

[[noreturn]] void fail_request(int rank, const char* problem) {
  throw Error(ErrorCode::kInternal, std::string("two-phase reading: ") + problem).with_rank(rank);
}

bool is_c_order(const StoredPayload& payload) {
  return StridedView{nullptr, payload.shape, payload.strides, itemsize(payload.dtype)}
      .is_contiguous();
}

}  // namespace

struct TileOwner::Round {
  std::vector<Loaded> loaded;
  std::vector<Packed> packed;
  std::vector<uint64_t> filled;  // bytes, by rank
  std::vector<Bytes> elements;   // by rank
};

// A read, for loaded[first, first + count).
struct TileOwner::Op {
  uint32_t file = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  size_t first = 0;
  size_t count = 0;
};

TileOwner::TileOwner(const ReadContext& context, const StripeOwners& owners, int rank, int world,
                     ReadFor way, uint64_t message_bytes, OwnPut own)
    : context_(context),
      owners_(owners),
      rank_(rank),
      world_(static_cast<size_t>(world)),
      way_(way),
      pair_bytes_(std::max((way == ReadFor::kPageCache ? kCachedRound : message_bytes) / world_,
                           kLeastPair)),
      part_bytes_(std::min({pair_bytes_, kLargestPart, uint64_t{context.buffers->buffer_bytes()}})),
      own_(std::move(own)) {}

const StoredTensor& TileOwner::tensor_of(const Served& served) const {
  return context_.metadata.tensors[served.tensor];
}
const StoredChunk& TileOwner::chunk_of(const Served& served) const {
  return tensor_of(served).chunks[served.chunk];
}

std::vector<Bytes> TileOwner::decide(const std::vector<Bytes>& requests) {
  Verdicts verdicts(world_);
  group(requests, verdicts);
  find_places();
  std::vector<Bytes> messages;
  for (const std::vector<bool>& served : verdicts) {
    messages.push_back(encode_verdicts(served, more()));
  }
  return messages;
}

void TileOwner::group(const std::vector<Bytes>& requests, Verdicts& verdicts) {
  std::map<std::tuple<uint32_t, uint32_t, uint64_t>, size_t> places;  // by chunk and tile
  std::vector<Served> tiles;
  for (size_t r = 0; r < requests.size(); ++r) {
    const auto rank = static_cast<int>(r);
    const std::vector<Request> asked = decode_requests(requests[r], rank);
    verdicts[r].resize(asked.size(), false);
    for (uint32_t i = 0; i < asked.size(); ++i) {
      const Request& request = asked[i];
      const std::vector<StoredTensor>& tensors = context_.metadata.tensors;
      if (request.tensor >= tensors.size() ||
          request.chunk >= tensors[request.tensor].chunks.size()) {
        fail_request(rank, "a chunk that the checkpoint doesn't have is asked for");
      }
      const StoredTensor& tensor = tensors[request.tensor];
      const Dims& shape = tensor.chunks[request.chunk].box.shape;
      check_bounds(request.box, shape);
      for_each_tile(shape, itemsize(tensor.dtype), owners_.stripe_bytes(), request.box,
                    [&](const Tile& tile) {
                      const auto [place, is_new] = places.try_emplace(
                          {request.tensor, request.chunk, tile.offset}, tiles.size());
                      if (is_new) tiles.push_back({request.tensor, request.chunk, tile, {}, {}});
                      tiles[place->second].asked.push_back({rank, i, request.box});
                    });
    }
  }
  judge(tiles, verdicts);
}

void TileOwner::judge(std::vector<Served>& tiles, Verdicts& verdicts) {
  std::vector<Box> boxes;
  for (Served& tile : tiles) {
    boxes.clear();
    for (const Asked& asked : tile.asked) boxes.push_back(asked.box);
    if (!worth_exchanging(chunk_of(tile).box.shape, itemsize(tensor_of(tile).dtype), boxes)) {
      continue;
    }
    for (const Asked& asked : tile.asked) {
      verdicts[static_cast<size_t>(asked.rank)][asked.request] = true;
    }
    served_.push_back(std::move(tile));
  }
}

void TileOwner::find_places() {
  std::sort(served_.begin(), served_.end(), [&](const Served& a, const Served& b) {
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
  const std::vector<StoredPayload> payloads = find_payloads(context_, chunks);
  for (size_t i = 0; i < served_.size(); ++i) {
    const ItemLocation& at = chunk_of(served_[i]).at;
    if (!try_add(at.offset, at.length)) {
      throw Error(ErrorCode::kCorrupt,
                  "the item at offset " + std::to_string(at.offset) + " has an impossible offset")
          .with_key(tensor_of(served_[i]).key)
          .with_file(context_.metadata.files[at.file]);
    }
    served_[i].payload = payloads[chunk_index[i]];
  }
}

// The parts of the next tile, by their place on disk.
void TileOwner::cut_next() {
  Served& served = served_[next_];
  std::vector<Box> boxes;
  for (const Asked& asked : served.asked) boxes.push_back(asked.box);
  boxes = merged_boxes(boxes);
  for (const Box& box : boxes) {
    split(served.payload, box, part_bytes_, [&](Part part) { parts_.push_back(std::move(part)); });
  }
  if (boxes.size() > 1) {
    std::stable_sort(parts_.begin(), parts_.end(),
                     [](const Part& a, const Part& b) { return a.offset < b.offset; });
  }
  served.checked = way_ == ReadFor::kMessages && context_.verify_checksums &&
                   served.payload.record_crc32 && fills_record(chunk_of(served), served.payload) &&
                   is_c_order(served.payload) && boxes.size() == 1 &&
                   boxes.front() == served.tile.box;
}

// False when the round has no room for the part.
bool TileOwner::schedule(Round& round, const Part& part) {
  const Served& served = served_[next_];
  const size_t first = round.packed.size();
  bool fits = round.loaded.size() < kRoundParts;
  for (const Asked& asked : served.asked) {
    const auto common = intersect(part.box, asked.box);
    if (!common) continue;
    uint64_t& filled = round.filled[static_cast<size_t>(asked.rank)];
    round.packed.push_back({asked.rank, {asked.request, *common}, filled});
    filled += static_cast<uint64_t>(common->numel()) * itemsize(served.payload.dtype);
    fits = fits && filled <= pair_bytes_;
  }
  if (!fits && !round.loaded.empty()) {
    for (size_t i = round.packed.size(); i-- > first;) {
      round.filled[static_cast<size_t>(round.packed[i].rank)] = round.packed[i].at;
    }
    round.packed.resize(first);
    return false;
  }
  round.loaded.push_back({next_, part, chunk_of(served).at.offset + part.offset, first,
                          round.packed.size() - first, 0, next_part_ + 1 == parts_.size()});
  return true;
}

TileOwner::Round TileOwner::plan_round() {
  Round round;
  round.filled.assign(world_, 0);
  while (more()) {
    if (parts_.empty()) cut_next();
    for (; next_part_ < parts_.size(); ++next_part_) {
      if (!schedule(round, parts_[next_part_])) return round;
    }
    ++next_;
    parts_.clear();
    next_part_ = 0;
  }
  return round;
}

std::vector<Bytes> TileOwner::next_round() {
  return way_ == ReadFor::kPageCache ? cache_round() : read_round();
}

std::vector<Bytes> TileOwner::read_round() {
  Round round = plan_round();
  std::vector<RoundMessage> messages(world_);
  for (const Packed& packed : round.packed) {
    if (packed.rank == rank_) continue;
    messages[static_cast<size_t>(packed.rank)].slots.push_back(packed.slot);
  }
  round.elements.resize(world_);
  for (size_t rank = 0; rank < world_; ++rank) {
    if (static_cast<int>(rank) == rank_) continue;
    round.elements[rank].reserve(round.filled[rank] +
                                 (messages[rank].slots.size() + 2) * kSlotDescription);
    round.elements[rank].resize(round.filled[rank]);
  }
  read(round);
  add_checks(round, messages);
  std::vector<Bytes> out;
  for (size_t rank = 0; rank < world_; ++rank) {
    out.push_back(encode_round(std::move(round.elements[rank]), messages[rank], more()));
  }
  return out;
}

// As many portions as it takes for something to be brought in: what is there already is no work.
std::vector<Bytes> TileOwner::cache_round() {
  std::vector<RoundMessage> messages(world_);
  for (uint64_t fetched = 0; more() && fetched < kLeastFetched;) {
    const Round round = plan_round();
    fetched += prefetch(round);
    for (const Packed& packed : round.packed) {
      messages[static_cast<size_t>(packed.rank)].slots.push_back(packed.slot);
    }
  }
  std::vector<Bytes> out;
  for (const RoundMessage& message : messages) out.push_back(encode_round({}, message, more()));
  return out;
}

std::vector<TileOwner::Op> TileOwner::make_ops(const Round& round) const {
  const uint64_t buffer = context_.buffers->buffer_bytes();
  std::vector<Op> ops;
  for (size_t i = 0; i < round.loaded.size(); ++i) {
    const Loaded& loaded = round.loaded[i];
    const uint32_t file = chunk_of(served_[loaded.served]).at.file;
    const uint64_t end = loaded.begin + loaded.part.size;
    if (!ops.empty()) {
      Op& last = ops.back();
      if (last.file == file && loaded.begin >= last.begin && loaded.begin <= last.end + kJoinGap &&
          std::max(end, last.end) - last.begin <= buffer) {
        last.end = std::max(last.end, end);
        ++last.count;
        continue;
      }
    }
    ops.push_back({file, loaded.begin, end, i, 1});
  }
  return ops;
}

std::vector<ReadOp> TileOwner::reads_of(const Round& round, const std::vector<Op>& ops) {
  if (ops.empty()) return {};
  files_.erase(files_.begin(), files_.lower_bound(ops.front().file));  // served in this order
  std::vector<ReadOp> reads;
  reads.reserve(ops.size());
  for (const Op& op : ops) {
    reads.push_back({open(round.loaded[op.first]), op.begin, op.end - op.begin, nullptr});
  }
  return reads;
}

// The calling thread alone: the others are reading what earlier rounds brought. Returns how many
// bytes were not there.
uint64_t TileOwner::prefetch(const Round& round) {
  const std::vector<ReadOp> reads = reads_of(round, make_ops(round));
  const ReadOptions options{nullptr, context_.buffers, context_.deadline, context_.cache};
  try {
    return context_.storage.prefetch(reads, options);
  } catch (...) {
    fail_read(round);
  }
}

void TileOwner::read(Round& round) {
  const std::vector<Op> ops = make_ops(round);
  const std::vector<ReadOp> reads = reads_of(round, ops);
  const ReadOptions options{&context_.threads, context_.buffers, context_.deadline, context_.cache};
  try {
    context_.storage.read(reads, options, [&](size_t i, ByteView bytes) {
      const Op& op = ops[i];
      for (size_t l = op.first; l < op.first + op.count; ++l) {
        Loaded& loaded = round.loaded[l];
        take(round, loaded, bytes.subspan(loaded.begin - op.begin, loaded.part.size));
      }
    });
  } catch (...) {
    fail_read(round);
  }
}

const ReadableFile* TileOwner::open(const Loaded& loaded) {
  const Served& served = served_[loaded.served];
  const uint32_t index = chunk_of(served).at.file;
  std::unique_ptr<ReadableFile>& file = files_[index];
  if (file) return file.get();
  try {
    file = open_data(context_, index);
  } catch (...) {
    throw current_error().with_key(tensor_of(served).key);
  }
  return file.get();
}

// The error in flight, with the key where only one can be meant.
void TileOwner::fail_read(const Round& round) const {
  Error error = current_error();
  std::set<uint32_t> tensors;
  for (const Loaded& loaded : round.loaded) {
    const Served& served = served_[loaded.served];
    const std::string& name = context_.metadata.files[chunk_of(served).at.file];
    if (error.file().empty() || error.file() == name) tensors.insert(served.tensor);
  }
  if (tensors.size() == 1) error.with_key(context_.metadata.tensors[*tensors.begin()].key);
  throw error;
}

void TileOwner::take(Round& round, Loaded& loaded, ByteView bytes) {
  const Served& served = served_[loaded.served];
  if (served.checked) loaded.crc = crc32(bytes);
  for (size_t i = loaded.first; i < loaded.first + loaded.count; ++i) {
    const Packed& packed = round.packed[i];
    if (packed.rank == rank_) {
      own_(packed.slot.request, served.payload, loaded.part, bytes);
      continue;
    }
    std::byte* to = round.elements[static_cast<size_t>(packed.rank)].data() + packed.at;
    const Box& box = packed.slot.box;
    deliver(served.payload, loaded.part, bytes,
            {served.tensor, served.chunk, box,
             TensorView::contiguous(to, served.payload.dtype, box.shape)});
  }
}

// Parts come in the order of their tiles, and of their bytes within one.
void TileOwner::add_checks(const Round& round, std::vector<RoundMessage>& messages) {
  for (const Loaded& loaded : round.loaded) {
    const Served& served = served_[loaded.served];
    if (!served.checked) continue;
    crc_ = crc32_combine(crc_, loaded.crc, loaded.part.size);
    if (!loaded.last) continue;
    const StoredChunk& chunk = chunk_of(served);
    const int checker = owners_.owner(chunk.at.file, chunk.at.offset);  // the first tile's owner
    const uint64_t size =
        static_cast<uint64_t>(served.tile.box.numel()) * itemsize(served.payload.dtype);
    messages[static_cast<size_t>(checker)].checks.push_back(
        {served.tensor, tensor_of(served).first_of_item(served.chunk),
         begin_in_item(chunk, served.payload.dtype) + served.tile.offset, size,
         std::exchange(crc_, 0), served.payload.record_size, *served.payload.record_crc32});
  }
}

void TileOwner::take_checks(std::span<const TileCheck> checks) {
  for (const TileCheck& check : checks) checks_[{check.tensor, check.chunk}].push_back(check);
}

void TileOwner::verify() const {
  for (const auto& [place, checks] : checks_) {
    std::vector<TileCheck> ordered = checks;
    std::sort(ordered.begin(), ordered.end(),
              [](const TileCheck& a, const TileCheck& b) { return a.offset < b.offset; });
    uint64_t size = 0;
    uint32_t crc = 0;
    for (const TileCheck& check : ordered) {
      if (check.offset != size) break;
      crc = crc32_combine(crc, check.crc, check.size);
      size += check.size;
    }
    const TileCheck& any = ordered.front();
    if (size != any.record_size || crc == any.record_crc32) continue;  // in part, or whole and good
    const StoredTensor& tensor = context_.metadata.tensors[any.tensor];
    const ItemLocation& at = tensor.chunks[any.chunk].at;
    throw Error(ErrorCode::kCorrupt, "the item at offset " + std::to_string(at.offset) +
                                         " is damaged: expected CRC-32 " +
                                         std::to_string(any.record_crc32) + " of its " +
                                         std::to_string(any.record_size) +
                                         " bytes of elements, found " + std::to_string(crc))
        .with_key(tensor.key)
        .with_file(context_.metadata.files[at.file]);
  }
}

}  // namespace tilestone::engine
