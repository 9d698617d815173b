// How a delta holds the elements of a box that have changed. Pure functions on bytes; elements are
// compared by their bits, so NaN and -0.0 are as good as any others.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/format/safetensors/delta_index.h"
#include "tilestone/geometry/box.h"

namespace tilestone::engine {

// A box of more bytes is encoded in parts.
inline constexpr uint64_t kPieceBytes = 4u << 20;

// The box, cut into boxes of at most kPieceBytes. Their elements follow one another in C order.
std::vector<Box> pieces_of(const Box& box, uint64_t itemsize);

struct EncodedPiece {
  DeltaKind kind = DeltaKind::kWhole;
  uint64_t gap_bytes = 1;  // of kSparse: of a number in `positions`, 1 or 2
  Bytes positions;         // of kSparse
  Bytes values;            // of kWhole nothing: they are the new elements themselves
  uint64_t bytes() const { return positions.size() + values.size(); }
};

// The smallest of the encodings that are worth a try; nullopt: nothing has changed. Both are the
// elements of one box in C order, of the same size. `passed` gets them block by block, in their
// order, while they are in the second-level cache.
using PassedBlock = std::function<void(ByteView base, ByteView now)>;
std::optional<EncodedPiece> encode_piece(ByteView base, ByteView now, uint64_t itemsize,
                                         const PassedBlock& passed = nullptr);

// Makes `elements`, which are the base's, those of the new version. Throws Error(kCorrupt) if the
// piece does not fit them; some may have been changed then.
void apply_piece(DeltaKind kind, uint64_t gap_bytes, ByteView positions, ByteView values,
                 MutableByteView elements, uint64_t itemsize);

// Throws what apply_piece() would throw for that many elements.
void check_piece(DeltaKind kind, uint64_t gap_bytes, ByteView positions, ByteView values,
                 uint64_t elements, uint64_t itemsize);

}  // namespace tilestone::engine
