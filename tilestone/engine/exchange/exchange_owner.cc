#include "tilestone/engine/exchange/exchange_owner_internal.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/deliver_internal.h"
#include "tilestone/engine/read/payloads_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kLeastPair = 64u << 10;    // bytes of a message that are always allowed
constexpr uint64_t kLargestPart = 1u << 20;   // bytes: a detour on the way to a device's memory
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
      own_(std::move(own)),
      // What is prefetched, the calling thread asks for alone: the others read what is there.
      reader_(context, way == ReadFor::kPageCache ? nullptr : &context.threads) {}

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
  bool fits = !reader_.full();
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
  round.loaded.push_back(
      {next_, part, first, round.packed.size() - first, next_part_ + 1 == parts_.size()});
  reader_.add({.file = chunk_of(served).at.file,
               .begin = chunk_of(served).at.offset + part.offset,
               .size = part.size,
               .key = &tensor_of(served).key,
               .summed = served.checked});
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
  const std::vector<ByteRange> ranges =
      reader_.read([&](size_t i, ByteView bytes) { take(round, round.loaded[i], bytes); });
  add_checks(round, ranges, messages);
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
    fetched += reader_.prefetch();
    for (const Packed& packed : round.packed) {
      messages[static_cast<size_t>(packed.rank)].slots.push_back(packed.slot);
    }
  }
  std::vector<Bytes> out;
  for (const RoundMessage& message : messages) out.push_back(encode_round({}, message, more()));
  return out;
}

void TileOwner::take(Round& round, const Loaded& loaded, ByteView bytes) {
  const Served& served = served_[loaded.served];
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
void TileOwner::add_checks(const Round& round, const std::vector<ByteRange>& ranges,
                           std::vector<RoundMessage>& messages) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Loaded& loaded = round.loaded[i];
    const Served& served = served_[loaded.served];
    if (!served.checked) continue;
    sum_.add(sum_.size(), ranges[i].size, ranges[i].crc32);
    if (!loaded.last) continue;
    const StoredChunk& chunk = chunk_of(served);
    const int checker = owners_.owner(chunk.at.file, chunk.at.offset);  // the first tile's owner
    const RecordSum sum = std::exchange(sum_, {});
    messages[static_cast<size_t>(checker)].checks.push_back(
        {served.tensor, tensor_of(served).first_of_item(served.chunk),
         begin_in_item(chunk, served.payload.dtype) + served.tile.offset, sum.size(), sum.crc32(),
         served.payload.record_size, *served.payload.record_crc32});
  }
}

void TileOwner::take_checks(std::span<const TileCheck> checks) {
  for (const TileCheck& check : checks) {
    Record& record = records_[{check.tensor, check.chunk}];
    record.size = check.record_size;
    record.crc32 = check.record_crc32;
    record.sum.add(check.offset, check.size, check.crc);
  }
}

void TileOwner::verify() const {
  for (const auto& [place, record] : records_) {
    if (record.sum.size() != record.size) continue;  // read in part
    expect_record(context_, {place.first, place.second}, record.size, record.crc32,
                  record.sum.crc32());
  }
}

}  // namespace tilestone::engine
