// Encodes the boxes of a tensor, and sums both versions, in one pass over the elements.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/delta/encoding_internal.h"
#include "tilestone/format/safetensors/delta_index.h"

namespace tilestone::engine {

// Boxes of pieces_of() whose elements are in memory at a time: bytes that follow one another.
struct BoxesAtOnce {
  std::span<const Box> boxes;
  uint64_t begin = 0, size = 0;  // in bytes, of all that was given
};
std::vector<BoxesAtOnce> some_at_once(std::span<const Box> boxes, uint64_t item_bytes);

struct ComparedPiece {
  Box box;
  ByteView now = {};
  std::optional<EncodedPiece> encoded = {};  // nullopt: unchanged
  uint32_t before = 0, after = 0;            // portions of the tensor's CRC-32 (box_crc_internal.h)
};

// The elements of the boxes follow one another in `base` and in `now`. Without a base everything is
// new; without `now` everything is removed, and only summed. `sum_base`: whether `before` is
// wanted.
std::vector<ComparedPiece> compare_pieces(const DeltaTensor& tensor, std::span<const Box> boxes,
                                          ByteView base, ByteView now, bool sum_base,
                                          ThreadPool& threads);

// The index of a delta with these tensors, in any order.
DeltaIndex make_index(std::vector<DeltaTensor> tensors);
// What is known from the index; `bytes` and `seconds` are not set.
DeltaReport report_of(const DeltaIndex& index);

}  // namespace tilestone::engine
