#include "tilestone/engine/delta/sums_internal.h"

#include <fmt/format.h>

#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone::engine {

namespace {

// As in base/both_ways.h.
constexpr auto walk_sum = [](auto& io, auto& sum) {
  both::text(io, sum.key);
  wire::dtype(io, sum.dtype);
  wire::shape(io, sum.shape);
  wire::box(io, sum.shape, sum.box);
  both::u8(io, sum.has_base);
  both::u32(io, sum.before);
  both::u32(io, sum.after);
  both::each(io, sum.pieces, 7, [&](auto& piece) {
    wire::box(io, sum.shape, piece.box);
    both::u8(io, piece.kind);
    both::u8(io, piece.gap_bytes);
    both::u32(io, piece.crc32);
    both::text(io, piece.file);
  });
};

}  // namespace

Bytes encode_sums(std::span<const ShardSum> sums) {
  ByteWriter writer;
  both::each(writer, sums, 13, [&](const ShardSum& sum) { walk_sum(writer, sum); });
  return std::move(writer).take();
}

std::vector<ShardSum> decode_sums(ByteView bytes, int rank) {
  ByteReader reader(bytes, "the sums of rank " + std::to_string(rank));
  std::vector<ShardSum> sums;
  both::each(reader, sums, 13, [&](ShardSum& sum) { walk_sum(reader, sum); });
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
