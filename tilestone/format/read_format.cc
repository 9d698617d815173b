#include "tilestone/format/read_format_internal.h"

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

std::optional<ItemFault> size_fault(const StoredTensor& tensor, const StoredChunk& chunk,
                                    uint64_t size) {
  const uint64_t expected = static_cast<uint64_t>(chunk.box.numel()) * itemsize(tensor.dtype);
  if (chunk.strides || size == expected) return std::nullopt;
  return ItemFault{0, "expected a tensor of " + std::to_string(expected) + " bytes, found " +
                          std::to_string(size) + " bytes"};
}

}  // namespace

void ReadFormat::check(const Items&) const {
  throw Error(ErrorCode::kUnsupported, "a save can't write the format " + std::string(name()))
      .with_hint("save in the format torch_dist, and convert the checkpoint: `tilestone convert`");
}

StoredPayload ReadFormat::parse_tensor(const StoredTensor& tensor, const StoredChunk& chunk,
                                       const ItemLocation& at, std::span<const ByteView>) const {
  if (const auto fault = size_fault(tensor, chunk, at.length)) {
    throw Error(ErrorCode::kCorrupt, fault->problem);
  }
  return {.dtype = tensor.dtype,
          .shape = chunk.box.shape,
          .strides = chunk.strides.value_or(contiguous_strides(chunk.box.shape)),
          .offset = 0,
          .record_offset = 0,
          .record_size = at.length,
          .record_crc32 = std::nullopt};
}

Bytes ReadFormat::decode(Codec, ByteView, uint64_t) const {
  throw Error(ErrorCode::kInternal,
              "items of the format " + std::string(name()) + " have no codec");
}

std::optional<ItemFault> ReadFormat::verify_tensor(const StoredTensor& tensor,
                                                   const StoredChunk& chunk, ByteView item) const {
  return size_fault(tensor, chunk, item.size());
}

void ReadFormat::fail_only_read() const {
  throw Error(ErrorCode::kInternal, "the format " + std::string(name()) + " is only read");
}

}  // namespace tilestone
