#include "tilestone/engine/delta/sums_internal.h"

#include <fmt/format.h>

#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone::engine {

void ShardSum::encode(ByteWriter& writer) const {
  writer.string(key);
  wire::write_dtype(writer, dtype);
  wire::write_shape(writer, shape);
  wire::write_box(writer, box);
  writer.u8(has_base ? 1 : 0);
  writer.u32(before);
  writer.u32(after);
  writer.varint(pieces.size());
  for (const DeltaPiece& piece : pieces) {
    wire::write_box(writer, piece.box);
    writer.u8(static_cast<uint8_t>(piece.kind));
    writer.u8(static_cast<uint8_t>(piece.gap_bytes));
    writer.u32(piece.crc32);
    writer.string(piece.file);
  }
}

ShardSum ShardSum::decode(ByteReader& reader) {
  ShardSum sum;
  sum.key = reader.string();
  sum.dtype = wire::read_dtype(reader);
  sum.shape = wire::read_shape(reader);
  sum.box = wire::read_box(reader, sum.shape);
  sum.has_base = reader.u8() != 0;
  sum.before = reader.u32();
  sum.after = reader.u32();
  const uint64_t count = reader.count();
  for (uint64_t i = 0; i < count; ++i) {
    DeltaPiece piece{.box = wire::read_box(reader, sum.shape)};
    piece.kind = static_cast<DeltaKind>(reader.u8());
    piece.gap_bytes = reader.u8();
    piece.crc32 = reader.u32();
    piece.file = reader.string();
    sum.pieces.push_back(std::move(piece));
  }
  return sum;
}

Bytes encode_sums(std::span<const ShardSum> sums) {
  ByteWriter writer;
  writer.varint(sums.size());
  for (const ShardSum& sum : sums) sum.encode(writer);
  return std::move(writer).take();
}

std::vector<ShardSum> decode_sums(ByteView bytes, int rank) {
  ByteReader reader(bytes, "the sums of rank " + std::to_string(rank));
  std::vector<ShardSum> sums;
  const uint64_t count = reader.count();
  for (uint64_t i = 0; i < count; ++i) sums.push_back(ShardSum::decode(reader));
  reader.expect_end();
  return sums;
}

uint32_t SummedTensor::crc32() const {
  uint32_t portions = 0;
  for (const auto& [box, sum] : boxes) portions ^= sum.first;
  return crc_of_portions(portions, static_cast<uint64_t>(numel(shape)) * itemsize(dtype));
}

void add_sums(SummedTensors& tensors, std::span<const ShardSum> sums, int rank) {
  for (const ShardSum& sum : sums) {
    SummedTensor& tensor =
        tensors.try_emplace(sum.key, SummedTensor{sum.dtype, sum.shape}).first->second;
    if (tensor.dtype != sum.dtype || tensor.shape != sum.shape) {
      throw Error(ErrorCode::kMismatch, "ranks have the tensor with different dtypes or shapes")
          .with_key(sum.key)
          .with_rank(rank);
    }
    tensor.before ^= sum.before;
    tensor.has_base = tensor.has_base && (sum.has_base || sum.box.empty());
    tensor.pieces.insert(tensor.pieces.end(), sum.pieces.begin(), sum.pieces.end());
    const auto [found, is_new] = tensor.boxes.try_emplace(sum.box, sum.after, rank);
    if (is_new) {
      tensor.covered += static_cast<uint64_t>(sum.box.numel());
    } else if (found->second.first != sum.after) {
      throw Error(ErrorCode::kMismatch, fmt::format("ranks {} and {} hold different elements of {}",
                                                    found->second.second, rank, to_string(sum.box)))
          .with_key(sum.key);
    }
  }
}

void expect_covered(const SummedTensors& tensors) {
  for (const auto& [key, tensor] : tensors) {
    const auto expected = static_cast<uint64_t>(numel(tensor.shape));
    if (tensor.covered == expected) continue;
    throw Error(
        ErrorCode::kCoverage,
        fmt::format("the ranks' boxes have {} elements, the tensor {}", tensor.covered, expected))
        .with_key(key);
  }
}

}  // namespace tilestone::engine
