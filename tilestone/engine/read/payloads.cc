#include "tilestone/engine/read/payloads_internal.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/parts_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kGroupBytes = 16u << 20;  // probed bytes in memory at a time

const StoredTensor& tensor_of(const ReadContext& context, ChunkRef ref) {
  return context.metadata.tensors[ref.tensor];
}
const StoredChunk& chunk_of(const ReadContext& context, ChunkRef ref) {
  return tensor_of(context, ref).chunks[ref.chunk];
}

[[noreturn]] void fail(const ReadContext& context, ChunkRef ref, const std::string& problem) {
  const ItemLocation& at = chunk_of(context, ref).at;
  throw Error(ErrorCode::kCorrupt,
              "the item at offset " + std::to_string(at.offset) + " " + problem)
      .with_key(tensor_of(context, ref).key)
      .with_file(context.metadata.files[at.file]);
}

// Strides for `wanted`, which has the same elements but for dims of size 1.
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

// A checked item's payload, narrowed to a chunk that is a part of it.
void narrow_to_part(const StoredChunk& chunk, StoredPayload& payload) {
  const int64_t step = payload.strides[0];
  payload.offset += begin_in_item(chunk, payload.dtype) * static_cast<uint64_t>(step);
  payload.shape = chunk.box.shape;
  payload.strides = contiguous_strides(payload.shape);
  for (size_t d = 0; d < payload.shape.size(); ++d) {
    payload.strides[d] = payload.shape[d] == 1 ? 0 : payload.strides[d] * step;
  }
}

// What an item says about itself must be what the metadata says about it.
StoredPayload agreed(const ReadContext& context, ChunkRef ref, StoredPayload payload,
                     uint64_t item_size) {
  const StoredTensor& tensor = tensor_of(context, ref);
  const StoredChunk& chunk = chunk_of(context, ref);
  const Dims shape = item_shape(chunk);
  if (payload.dtype != tensor.dtype) {
    fail(context, ref,
         "holds " + std::string(to_string(payload.dtype)) + ", expected " +
             std::string(to_string(tensor.dtype)));
  }
  const auto strides = fit_strides(payload.shape, payload.strides, shape);
  if (!strides) {
    fail(context, ref,
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
  // Items without a header have no checksum of their own; the manifest may know it.
  if (!payload.record_crc32 && at.checksums) payload.record_crc32 = at.checksums->payload_crc32;
  return payload;
}

StoredPayload payload_from_manifest(const ReadContext& context, ChunkRef ref) {
  const StoredChunk& chunk = chunk_of(context, ref);
  StoredPayload payload;
  payload.dtype = tensor_of(context, ref).dtype;
  payload.shape = chunk.box.shape;
  payload.strides = contiguous_strides(payload.shape);
  payload.offset = chunk.at.checksums->payload_offset;
  payload.record_offset = payload.offset;
  payload.record_size = static_cast<uint64_t>(numel(payload.shape)) * itemsize(payload.dtype);
  payload.record_crc32 = chunk.at.checksums->payload_crc32;
  return agreed(context, ref, std::move(payload), chunk.at.length);
}

// Chunks that are looked into together, and where their probes lie in memory.
struct ProbeGroup {
  struct Probe {
    size_t chunk;  // index into the caller's chunks
    size_t place;  // among the chunk's probes
    uint32_t file;
    uint64_t begin, end;  // in the file
    ByteView bytes;
  };
  std::vector<size_t> chunks;
  std::vector<Probe> probes;
  uint64_t bytes = 0;
};

struct Run {
  uint32_t file;
  uint64_t begin, end;
  Bytes bytes;
};

// Neighbouring probes are read as one run; afterwards each probe knows its bytes.
std::vector<Run> read_probes(const ReadContext& context, ProbeGroup& group) {
  std::sort(group.probes.begin(), group.probes.end(), [](const auto& a, const auto& b) {
    return std::pair(a.file, a.begin) < std::pair(b.file, b.begin);
  });
  const uint64_t near = context.storage.read_costs().gap_bytes;
  std::vector<Run> runs;
  std::vector<size_t> run_of;
  for (const auto& probe : group.probes) {
    const bool joins =
        !runs.empty() && runs.back().file == probe.file && probe.begin <= runs.back().end + near;
    if (!joins) runs.push_back({probe.file, probe.begin, probe.end, {}});
    runs.back().end = std::max(runs.back().end, probe.end);
    run_of.push_back(runs.size() - 1);
  }
  std::map<uint32_t, std::unique_ptr<ReadableFile>> files;
  std::vector<ReadOp> ops;
  for (Run& run : runs) {
    auto& file = files[run.file];
    if (!file) file = open_data(context, run.file);
    if (run.end > file->size()) {
      throw Error(ErrorCode::kCorrupt, "expected at least " + std::to_string(run.end) +
                                           " bytes, found " + std::to_string(file->size()))
          .with_file(file->name());
    }
    run.bytes.resize(run.end - run.begin);
    ops.push_back({file.get(), run.begin, run.bytes.size(), run.bytes.data()});
  }
  const ReadOptions options{&context.threads, context.buffers, context.deadline, context.cache};
  context.storage.read(ops, options, [](size_t, ByteView) {});
  for (size_t i = 0; i < group.probes.size(); ++i) {
    auto& probe = group.probes[i];
    const Run& run = runs[run_of[i]];
    probe.bytes = ByteView(run.bytes).subspan(probe.begin - run.begin, probe.end - probe.begin);
  }
  return runs;
}

void parse_group(const ReadContext& context, std::span<const ChunkRef> chunks, ProbeGroup& group,
                 std::vector<StoredPayload>& payloads) {
  const std::vector<Run> runs = read_probes(context, group);
  std::map<size_t, std::vector<ByteView>> probed;  // by chunk, of those that need no probe too
  for (size_t chunk : group.chunks) probed[chunk];
  for (const auto& probe : group.probes) {
    std::vector<ByteView>& of_chunk = probed[probe.chunk];
    of_chunk.resize(std::max(of_chunk.size(), probe.place + 1));
    of_chunk[probe.place] = probe.bytes;
  }
  context.threads.parallel_for(group.chunks.size(), [&](size_t i) {
    const size_t index = group.chunks[i];
    const ItemLocation& at = chunk_of(context, chunks[index]).at;
    try {
      payloads[index] = agreed(context, chunks[index],
                               parse(context, chunks[index], at, probed.at(index)), at.length);
    } catch (...) {
      throw current_error()
          .with_key(tensor_of(context, chunks[index]).key)
          .with_file(context.metadata.files[at.file]);
    }
  });
  group = ProbeGroup();
}

void add_probes(const ReadContext& context, ChunkRef ref, size_t index, ProbeGroup& group) {
  const ItemLocation& at = chunk_of(context, ref).at;
  group.chunks.push_back(index);
  size_t place = 0;
  for (const ProbeRange& range : context.format.probe(at)) {
    if (range.offset > at.length || range.size > at.length - range.offset) {
      throw Error(ErrorCode::kInternal, "a probe reaches beyond its item");
    }
    if (!try_add(at.offset, at.length)) fail(context, ref, "has an impossible offset");
    const uint64_t begin = at.offset + range.offset;
    group.probes.push_back({index, place++, at.file, begin, begin + range.size, {}});
    group.bytes += range.size;
  }
}

}  // namespace

std::vector<StoredPayload> find_payloads(const ReadContext& context,
                                         std::span<const ChunkRef> chunks) {
  std::vector<StoredPayload> payloads(chunks.size());
  ProbeGroup group;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ItemLocation& at = chunk_of(context, chunks[i]).at;
    if (at.codec != Codec::kNone) continue;
    if (at.checksums && !tensor_of(context, chunks[i]).chunk_shape) {
      payloads[i] = payload_from_manifest(context, chunks[i]);
      continue;
    }
    add_probes(context, chunks[i], i, group);
    if (group.bytes >= kGroupBytes) parse_group(context, chunks, group, payloads);
  }
  if (!group.chunks.empty()) parse_group(context, chunks, group, payloads);
  return payloads;
}

StoredPayload payload_in(const ReadContext& context, ChunkRef chunk, ByteView item) {
  ItemLocation at = chunk_of(context, chunk).at;
  at.codec = Codec::kNone;
  at.checksums.reset();
  at.length = item.size();
  std::vector<ByteView> probed;
  for (const ProbeRange& range : context.format.probe(at)) {
    probed.push_back(item.subspan(range.offset, range.size));
  }
  try {
    return agreed(context, chunk, parse(context, chunk, at, probed), item.size());
  } catch (...) {
    throw current_error()
        .with_key(tensor_of(context, chunk).key)
        .with_file(context.metadata.files[at.file]);
  }
}

}  // namespace tilestone::engine
