// Tensors and values as torch.save archives.
#pragma once

#include <cstdint>

#include "tilestone/format/format.h"
#include "tilestone/state/value.h"

namespace tilestone::torch_dist {

// Payloads of at least this many bytes start at a multiple of a page in their file, so that direct
// I/O can put them straight where they belong; smaller ones at a multiple of 64.
inline constexpr uint64_t kPageAlignedFrom = 64u << 10;
inline constexpr uint64_t kPlacedFrom = 1u << 20;  // as in memory: see payload_padding
inline constexpr uint64_t kPage = 4096;

ItemRecipe encode_tensor_item(const Piece& piece, uint64_t file_offset);

// Error(kInvalidArgument) for a value that can't be pickled: nested deeper than 1,000, or a
// Pickled inside a container.
Bytes write_archive(const Value& value);

}  // namespace tilestone::torch_dist
