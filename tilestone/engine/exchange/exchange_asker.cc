#include "tilestone/engine/exchange/exchange_asker_internal.h"

#include <string>

#include "tilestone/base/error.h"

namespace tilestone::engine {

Asker::Asker(Wanted wanted, const StripeOwners& owners, int world)
    : wanted_(std::move(wanted)), asked_(static_cast<size_t>(world)) {
  const Metadata& metadata = wanted_.context->metadata;
  unserved_.assign(wanted_.transfers.size(), true);
  for (size_t i = 0; i < wanted_.transfers.size(); ++i) {
    const Transfer& t = wanted_.transfers[i];
    const StoredTensor& tensor = metadata.tensors[t.tensor];
    const StoredChunk& chunk = tensor.chunks[t.chunk];
    if (chunk.at.codec != Codec::kNone) continue;
    const uint64_t begin = chunk.at.offset + begin_in_item(chunk, tensor.dtype);
    for_each_tile(chunk.box.shape, itemsize(tensor.dtype), owners.stripe_bytes(), t.box,
                  [&](const Tile& tile) {
                    const int owner = owners.owner(chunk.at.file, begin + tile.offset);
                    asked_[static_cast<size_t>(owner)].push_back(
                        {{t.tensor, t.chunk, *intersect(tile.box, t.box)}, i, false});
                  });
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

void Asker::take_verdicts(const std::vector<Bytes>& messages) {
  for (size_t owner = 0; owner < messages.size(); ++owner) {
    const std::vector<bool> served = decode_verdicts(messages[owner], static_cast<int>(owner));
    std::vector<AskedTransfer>& asked = asked_[owner];
    if (served.size() != asked.size()) {
      fail_exchange(static_cast<int>(owner), std::to_string(served.size()) +
                                                 " verdicts arrived, expected " +
                                                 std::to_string(asked.size()));
    }
    for (size_t i = 0; i < asked.size(); ++i) {
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

std::vector<Transfer> Asker::unserved() const {
  std::vector<Transfer> unserved;
  for (size_t i = 0; i < unserved_.size(); ++i) {
    if (unserved_[i]) unserved.push_back(wanted_.transfers[i]);
  }
  return unserved;
}

void Asker::expect_all(uint64_t elements) const {
  if (elements == promised_) return;
  throw Error(ErrorCode::kInternal, "two-phase reading: " + std::to_string(elements) +
                                        " elements arrived, expected " + std::to_string(promised_));
}

}  // namespace tilestone::engine
