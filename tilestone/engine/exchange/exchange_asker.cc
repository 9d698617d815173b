#include "tilestone/engine/exchange/exchange_asker_internal.h"

#include <algorithm>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/deliver_internal.h"

namespace tilestone::engine {
namespace {

[[noreturn]] void fail(int owner, const std::string& problem) {
  throw Error(ErrorCode::kInternal, "two-phase reading: " + problem).with_rank(owner);
}

}  // namespace

Asker::Asker(Wanted wanted, const StripeOwners& owners, int world)
    : wanted_(std::move(wanted)), asked_(static_cast<size_t>(world)) {
  const Metadata& metadata = wanted_.context->metadata;
  whole_.assign(wanted_.transfers.size(), true);
  awaited_.assign(wanted_.transfers.size(), 0);
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
  for (const std::vector<Asked>& asked : asked_) {
    std::vector<Request> requests;
    for (const Asked& one : asked) requests.push_back(one.request);
    messages.push_back(encode_requests(requests));
  }
  return messages;
}

void Asker::take_verdicts(const std::vector<Bytes>& messages) {
  for (size_t owner = 0; owner < messages.size(); ++owner) {
    const std::vector<bool> served = decode_verdicts(messages[owner], static_cast<int>(owner));
    std::vector<Asked>& asked = asked_[owner];
    if (served.size() != asked.size()) {
      fail(static_cast<int>(owner), std::to_string(served.size()) + " verdicts came, expected " +
                                        std::to_string(asked.size()));
    }
    for (size_t i = 0; i < asked.size(); ++i) {
      if (!served[i]) continue;
      asked[i].served = true;
      whole_[asked[i].transfer] = false;
      const auto elements = static_cast<uint64_t>(asked[i].request.box.numel());
      promised_ += elements;
      awaited_[asked[i].transfer] += elements;
    }
  }
}

Asker::Asked& Asker::find(int owner, uint32_t request) {
  std::vector<Asked>& asked = asked_[static_cast<size_t>(owner)];
  if (request >= asked.size()) fail(owner, "an element that was not asked for");
  return asked[request];
}

Transfer Asker::cut_out(const Asked& asked) const {
  const Transfer& t = wanted_.transfers[asked.transfer];
  Box inside = asked.request.box;
  for (size_t d = 0; d < inside.rank(); ++d) inside.offset[d] -= t.box.offset[d];
  return {t.tensor, t.chunk, asked.request.box, narrow_to(t.target, inside)};
}

void Asker::take(const std::vector<RoundMessage>& round) {
  struct Arrival {
    int owner;
    const Slot* slot;
    ByteView bytes;
  };
  std::vector<Arrival> arrivals;
  const Metadata& metadata = wanted_.context->metadata;
  for (size_t from = 0; from < round.size(); ++from) {
    const auto owner = static_cast<int>(from);
    ByteView left = round[from].elements;
    for (const Slot& slot : round[from].slots) {
      const Request& request = find(owner, slot.request).request;
      if (slot.box.rank() != request.box.rank() || !request.box.contains(slot.box)) {
        fail(owner, "elements beyond the box that was asked for");
      }
      const uint64_t size = static_cast<uint64_t>(slot.box.numel()) *
                            itemsize(metadata.tensors[request.tensor].dtype);
      if (size > left.size()) fail(owner, "a message is too short");
      arrivals.push_back({owner, &slot, left.first(size)});
      left = left.subspan(size);
    }
    if (!left.empty()) fail(owner, "a message is too long");
  }
  wanted_.context->threads.parallel_for(arrivals.size(), [&](size_t i) {
    const Arrival& arrival = arrivals[i];
    const Request& request = find(arrival.owner, arrival.slot->request).request;
    StoredPayload packed;
    packed.dtype = metadata.tensors[request.tensor].dtype;
    packed.shape = arrival.slot->box.shape;
    packed.strides = contiguous_strides(packed.shape);
    put(arrival.owner, arrival.slot->request, packed,
        Part{arrival.slot->box, 0, arrival.bytes.size()}, arrival.bytes);
  });
}

void Asker::read_announced(const std::vector<RoundMessage>& round) {
  std::vector<Transfer> ready;
  for (size_t from = 0; from < round.size(); ++from) {
    const auto owner = static_cast<int>(from);
    for (const Slot& slot : round[from].slots) {
      const size_t transfer = find(owner, slot.request).transfer;
      const auto elements = static_cast<uint64_t>(slot.box.numel());
      uint64_t& awaited = awaited_[transfer];
      if (elements == 0 || elements > awaited) fail(owner, "more was read than was asked for");
      awaited -= elements;
      delivered_ += elements;
      if (awaited == 0) ready.push_back(wanted_.transfers[transfer]);
    }
  }
  by_transfers_ = true;
  read_transfers(*wanted_.context, ready, *wanted_.progress);
}

void Asker::put(int owner, uint32_t request, const StoredPayload& payload, const Part& part,
                ByteView bytes) {
  const Asked& asked = find(owner, request);
  const auto common = intersect(part.box, asked.request.box);
  if (!common) return;
  const Transfer transfer = cut_out(asked);
  if (transfer.target.device == nullptr) {
    deliver(payload, part, bytes, transfer);
  } else {
    std::lock_guard lock(device_);
    deliver(payload, part, bytes, transfer);
  }
  const auto elements = static_cast<uint64_t>(common->numel());
  delivered_ += elements;
  wanted_.progress->add(elements * itemsize(payload.dtype));
}

std::vector<Transfer> Asker::rest() const {
  if (delivered_ != promised_) {
    throw Error(ErrorCode::kInternal, "two-phase reading: " + std::to_string(delivered_) +
                                          " elements came, expected " + std::to_string(promised_));
  }
  std::vector<Transfer> rest;
  for (size_t i = 0; i < whole_.size(); ++i) {
    if (whole_[i]) rest.push_back(wanted_.transfers[i]);
  }
  if (by_transfers_) return rest;
  for (const std::vector<Asked>& asked : asked_) {
    for (const Asked& one : asked) {
      if (!one.served && !whole_[one.transfer]) rest.push_back(cut_out(one));
    }
  }
  return rest;
}

}  // namespace tilestone::engine
