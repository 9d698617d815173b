#include "tilestone/engine/read/payloads_internal.h"

#include <mutex>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kGroupBytes = 16u << 20;  // probed bytes in memory at a time

const StoredTensor& tensor_of(const ReadContext& context, ChunkRef ref) {
  return context.metadata.tensors[ref.tensor];
}
const StoredChunk& chunk_of(const ReadContext& context, ChunkRef ref) {
  return tensor_of(context, ref).chunks[ref.chunk];
}

// The strides for the shape `wanted`, which may differ from `shape` only in dims of size 1. nullopt
// if it differs in more.
std::optional<Dims> fit_strides(const Dims& shape, const Dims& strides, const Dims& wanted) {
  Dims fitted(wanted.size(), 0);
  size_t d = 0;
  for (size_t w = 0; w < wanted.size(); ++w) {
    if (wanted[w] == 1) continue;
    while (d < shape.size() && shape[d] == 1) ++d;
    if (d == shape.size() || shape[d] != wanted[w]) return std::nullopt;
    fitted[w] = strides[d++];
  }
  while (d < shape.size() && shape[d] == 1) ++d;
  if (d != shape.size()) return std::nullopt;
  return fitted;
}

// Narrows the checked payload of an item to a chunk that is a part of the item.
void narrow_to_part(const StoredChunk& chunk, StoredPayload& payload) {
  const int64_t step = payload.strides[0];
  payload.offset += begin_in_item(chunk, payload.dtype) * static_cast<uint64_t>(step);
  payload.shape = chunk.box.shape;
  payload.strides = contiguous_strides(payload.shape);
  for (size_t d = 0; d < payload.shape.size(); ++d) {
    payload.strides[d] = payload.shape[d] == 1 ? 0 : payload.strides[d] * step;
  }
}

// Checks that an item's header agrees with the metadata, and returns the chunk's payload.
StoredPayload agreed(const ReadContext& context, ChunkRef ref, StoredPayload payload,
                     uint64_t item_size) {
  const StoredTensor& tensor = tensor_of(context, ref);
  const StoredChunk& chunk = chunk_of(context, ref);
  const Dims shape = item_shape(chunk);
  if (payload.dtype != tensor.dtype) {
    fail_chunk(context, ref,
               "holds " + std::string(to_string(payload.dtype)) + ", expected " +
                   std::string(to_string(tensor.dtype)));
  }
  const auto strides = fit_strides(payload.shape, payload.strides, shape);
  if (!strides) {
    fail_chunk(context, ref,
               "holds shape " + to_string(payload.shape) + ", expected " + to_string(shape));
  }
  payload.shape = shape;
  payload.strides = *strides;
  check_payload(payload, item_size);
  if (chunk.flat) narrow_to_part(chunk, payload);
  return payload;
}

StoredPayload parse(const ReadContext& context, ChunkRef ref, const ItemLocation& at,
                    std::span<const ByteView> probed) {
  StoredPayload payload =
      context.format.parse_tensor(tensor_of(context, ref), chunk_of(context, ref), at, probed);
  // Items without a header have no checksum of their own, but the manifest may have it.
  if (!payload.record_crc32 && at.checksums) payload.record_crc32 = at.checksums->payload_crc32;
  return payload;
}

StoredPayload payload_from_manifest(const ReadContext& context, ChunkRef ref) {
  const StoredChunk& chunk = chunk_of(context, ref);
  StoredPayload payload;
  payload.dtype = tensor_of(context, ref).dtype;
  payload.shape = chunk.box.shape;
  payload.strides = contiguous_strides(payload.shape);
  const ItemLocation& at = place_of(context, ref);
  payload.offset = at.checksums->payload_offset;
  payload.record_offset = payload.offset;
  payload.record_size = static_cast<uint64_t>(numel(payload.shape)) * itemsize(payload.dtype);
  payload.record_crc32 = at.checksums->payload_crc32;
  return agreed(context, ref, std::move(payload), at.length);
}

// Reads and parses the headers of several chunks together.
class Probes {
 public:
  Probes(const ReadContext& context, std::span<const ChunkRef> chunks, const UnreadChunk& unread,
         std::vector<StoredPayload>& payloads)
      : context_(context),
        chunks_(chunks),
        unread_(unread),
        payloads_(payloads),
        reader_(context, &context.threads) {}

  // `index`: of the chunk.
  void add(size_t index) {
    const ItemLocation& at = place_of(context_, chunks_[index]);
    Probe& probe = probes_.emplace_back(index, std::vector<Bytes>(), false);
    for (const ProbeRange& range : context_.format.probe(at)) {
      if (range.offset > at.length || range.size > at.length - range.offset) {
        throw Error(ErrorCode::kInternal, "a probe reaches beyond its item");
      }
      Bytes& bytes = probe.bytes.emplace_back(range.size);
      reader_.add({.file = at.file,
                   .begin = at.offset + range.offset,
                   .size = range.size,
                   .target = bytes.data(),
                   .key = &tensor_of(context_, chunks_[index]).key});
      probe_of_.push_back(probes_.size() - 1);
      bytes_ += range.size;
    }
    if (bytes_ >= kGroupBytes || reader_.full()) parse_all();
  }

  void parse_all() {
    RangeReader::Unread unread;
    if (unread_) unread = [&](size_t i, const Error& e) { skip(probes_[probe_of_[i]], e); };
    reader_.read({}, unread);
    context_.threads.parallel_for(probes_.size(), [&](size_t i) { parse_probe(probes_[i]); });
    probes_.clear();
    probe_of_.clear();
    bytes_ = 0;
  }

 private:
  struct Probe {
    size_t index;              // of the chunk
    std::vector<Bytes> bytes;  // of each range that the format needs
    bool skipped;              // passed to unread_
  };

  void skip(Probe& probe, const Error& error) {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(probe.skipped, true)) unread_(probe.index, error);
  }

  void parse_probe(Probe& probe) {
    if (probe.skipped) return;
    const ChunkRef ref = chunks_[probe.index];
    const ItemLocation& at = place_of(context_, ref);
    const std::vector<ByteView> views(probe.bytes.begin(), probe.bytes.end());
    try {
      payloads_[probe.index] = agreed(context_, ref, parse(context_, ref, at, views), at.length);
    } catch (...) {
      const Error error = current_error()
                              .with_key(tensor_of(context_, ref).key)
                              .with_file(context_.metadata.files[at.file]);
      if (!unread_ || error.code() != ErrorCode::kCorrupt) throw error;
      skip(probe, error);
    }
  }

  const ReadContext& context_;
  const std::span<const ChunkRef> chunks_;
  const UnreadChunk& unread_;
  std::vector<StoredPayload>& payloads_;
  RangeReader reader_;
  std::vector<Probe> probes_;
  std::vector<size_t> probe_of_;  // of each range of the reader's batch
  std::mutex mutex_;
  uint64_t bytes_ = 0;
};

}  // namespace

std::vector<StoredPayload> find_payloads(const ReadContext& context,
                                         std::span<const ChunkRef> chunks,
                                         const UnreadChunk& unread) {
  std::vector<StoredPayload> payloads(chunks.size());
  Probes probes(context, chunks, unread, payloads);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ItemLocation& at = place_of(context, chunks[i]);
    if (!try_add(at.offset, at.length)) fail_chunk(context, chunks[i], "has an invalid length");
    if (at.codec != Codec::kNone) continue;
    if (at.checksums && !tensor_of(context, chunks[i]).chunk_shape) {
      payloads[i] = payload_from_manifest(context, chunks[i]);
    } else {
      probes.add(i);
    }
  }
  probes.parse_all();
  return payloads;
}

const ItemLocation& place_of(const ReadContext& context, ChunkRef chunk) {
  return context.metadata.place(chunk.tensor, chunk.chunk, chunk.copy);
}

void warn_of_damage(const Error& error, const ReadContext& context, ChunkRef chunk) {
  warn_of_damage(error, tensor_of(context, chunk).key,
                 context.metadata.files[place_of(context, chunk).file]);
}

void warn_of_damage(const Error& error, const std::string& key, const std::string& file) {
  log(LogLevel::kWarning, "\"" + key + "\" in " + file + ": " + error.message() +
                              "; it is read from a copy in another file "
                              "(verify reports the damage)");
}

void log_unchecked_parts(const ReadContext& context, ChunkRef chunk) {
  if (!context.warned->first_unchecked()) return;
  log(LogLevel::kInfo,
      "parts of items are read, and are not checked, because the checkpoint has no "
      "checksums of parts of items: \"" +
          tensor_of(context, chunk).key + "\" in " +
          context.metadata.files[place_of(context, chunk).file] +
          ", and possibly others (verify checks them)");
}

void fail_chunk(const ReadContext& context, ChunkRef chunk, const std::string& problem) {
  const ItemLocation& at = place_of(context, chunk);
  throw Error(ErrorCode::kCorrupt,
              "the item at offset " + std::to_string(at.offset) + " " + problem)
      .with_key(tensor_of(context, chunk).key)
      .with_file(context.metadata.files[at.file]);
}

void expect_record(const ReadContext& context, ChunkRef chunk, uint64_t size, uint32_t expected,
                   uint32_t found) {
  if (found == expected) return;
  fail_chunk(context, chunk,
             "is damaged: expected CRC-32 " + std::to_string(expected) + " of its " +
                 std::to_string(size) + " bytes of elements, found " + std::to_string(found));
}

StoredPayload payload_in(const ReadContext& context, ChunkRef chunk, ByteView item) {
  ItemLocation at = place_of(context, chunk);
  at.codec = Codec::kNone;
  at.checksums.reset();
  at.length = item.size();
  std::vector<ByteView> probed;
  for (const ProbeRange& range : context.format.probe(at)) {
    probed.push_back(item.subspan(range.offset, range.size));
  }
  return with_key_and_file(tensor_of(context, chunk).key, context.metadata.files[at.file], [&] {
    return agreed(context, chunk, parse(context, chunk, at, probed), item.size());
  });
}

}  // namespace tilestone::engine
