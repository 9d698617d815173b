#include "tilestone/engine/exchange/exchange_asker_internal.h"

#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/lost_files_internal.h"
#include "tilestone/state/chunk_blocks.h"

namespace tilestone::engine {
namespace {

// Whether a box, read by whole blocks, is read with little in addition. Through the page cache the
// rank then checks these blocks itself: their owner would have to read them once more to do so.
bool fills_its_blocks(const ChunkBlocks& blocks, const Box& box, DType dtype) {
  std::vector<char> needed(blocks.expected.size());
  mark_blocks(blocks, box, needed);
  uint64_t bytes = 0;
  for (uint64_t b = 0; b < needed.size(); ++b) {
    if (needed[b]) bytes += blocks.block_end(b) - blocks.block_begin(b);
  }
  const uint64_t wanted = static_cast<uint64_t>(box.numel()) * itemsize(dtype);
  return bytes - wanted <= wanted / 4;
}

}  // namespace

Asker::Asker(Wanted wanted, const StripeOwners& owners, int world, ReadFor way)
    : wanted_(std::move(wanted)), asked_(static_cast<size_t>(world)) {
  const Metadata& metadata = wanted_.context->metadata;
  unserved_.assign(wanted_.transfers.size(), true);
  declined_.assign(wanted_.transfers.size(), false);
  checked_.assign(wanted_.transfers.size(), false);
  for (size_t i = 0; i < wanted_.transfers.size(); ++i) {
    const Transfer& t = wanted_.transfers[i];
    const StoredTensor& tensor = metadata.tensors[t.tensor];
    const StoredChunk& chunk = tensor.chunks[t.chunk];
    if (chunk.at.codec != Codec::kNone) continue;
    const uint64_t begin = chunk.at.offset + begin_in_item(chunk, tensor.dtype);
    const auto ask = [&](uint64_t tile, Box box) {  // `tile`: its offset in the chunk
      const int owner = owners.owner(chunk.at.file, begin + tile);
      asked_[static_cast<size_t>(owner)].push_back(
          {{t.tensor, t.chunk, std::move(box), !checked_[i]}, i, false});
    };
    if (const auto blocks = blocks_of(metadata, t.tensor, t.chunk)) {
      if (t.box.empty()) continue;
      checked_[i] = wanted_.context->verify_checksums &&
                    (way != ReadFor::kPageCache || !fills_its_blocks(*blocks, t.box, tensor.dtype));
      const uint64_t bytes = tile_bytes(*blocks, owners.stripe_bytes());
      for_each_block_tile(*blocks, bytes, t.box,
                          [&](uint64_t tile, const Box& part) { ask(tile * bytes, part); });
    } else {
      for_each_tile(chunk.box.shape, itemsize(tensor.dtype), owners.stripe_bytes(), t.box,
                    [&](const Tile& tile) { ask(tile.offset, *intersect(tile.box, t.box)); });
    }
  }
}

std::vector<Bytes> Asker::requests() const {
  std::vector<Bytes> messages;
  for (const std::vector<AskedTransfer>& asked : asked_) {
    std::vector<TileRequest> requests;
    for (const AskedTransfer& one : asked) requests.push_back(one.request);
    messages.push_back(encode_requests(requests));
  }
  return messages;
}

void Asker::note_verdicts(const std::vector<Bytes>& messages) {
  for (size_t owner = 0; owner < messages.size(); ++owner) {
    const std::vector<bool> served = decode_verdicts(messages[owner], static_cast<int>(owner));
    std::vector<AskedTransfer>& asked = asked_[owner];
    if (served.size() != asked.size()) {
      fail_exchange(static_cast<int>(owner), std::to_string(served.size()) +
                                                 " verdicts arrived, expected " +
                                                 std::to_string(asked.size()));
    }
    for (size_t i = 0; i < asked.size(); ++i) {
      if (!served[i]) declined_[asked[i].transfer] = true;
      if (!served[i]) continue;
      asked[i].served = true;
      unserved_[asked[i].transfer] = false;
      promised_ += static_cast<uint64_t>(asked[i].request.box.numel());
    }
  }
}

const Asker::AskedTransfer& Asker::find(int owner, uint32_t request) const {
  const std::vector<AskedTransfer>& asked = asked_[static_cast<size_t>(owner)];
  if (request >= asked.size()) fail_exchange(owner, "a rank sent elements that were not requested");
  return asked[request];
}

Transfer Asker::cut_out(const AskedTransfer& asked) const {
  const Transfer& t = wanted_.transfers[asked.transfer];
  const Box& box = asked.request.box;
  return {t.tensor, t.chunk, box, narrow_to(t.target, relative_to(box, t.box.offset))};
}

std::vector<Transfer> Asker::rest(const Chunks& damaged, bool unchecked) const {
  std::vector<Transfer> rest;
  for (size_t i = 0; i < unserved_.size(); ++i) {
    if (unserved_[i]) rest.push_back(wanted_.transfers[i]);
  }
  for (const std::vector<AskedTransfer>& of_owner : asked_) {
    for (const AskedTransfer& asked : of_owner) {
      if (unserved_[asked.transfer]) continue;
      const std::pair chunk(asked.request.tensor, asked.request.chunk);
      if (!asked.served) {
        if (unchecked || is_checked(asked.transfer)) rest.push_back(cut_out(asked));
      } else if (damaged.contains(chunk)) {
        rest.push_back(cut_out(asked));
        // If no file with a copy is left, reading the chunk's own item reports its damage.
        rest.back().copy = LostFiles(*wanted_.context)
                               .place_besides(chunk.first, chunk.second, {kNoCopy})
                               .value_or(kNoCopy);
        rest.back().substitute = true;
      }
    }
  }
  return rest;
}

void Asker::expect_all(uint64_t elements) const {
  if (elements == promised_) return;
  throw Error(ErrorCode::kInternal, "two-phase reading: " + std::to_string(elements) +
                                        " elements arrived, expected " + std::to_string(promised_));
}

}  // namespace tilestone::engine
