// Builds the bytes of a format's recipes in memory, as the engine streams them into files.
#pragma once

#include "tilestone/format/format.h"

namespace tilestone {

// The literal's bytes with the payload's CRC-32 inserted.
Bytes with_crc32(const Literal& literal, uint32_t crc);
// The item's bytes, including the padding before it. std::logic_error if their number differs from
// the recipe's.
Bytes render(const ItemRecipe& recipe);
// The CRC-32 of the whole item and of its payload.
ItemChecksums checksums_of(const ItemRecipe& recipe);

// Wraps a format so that its data files have a header and a trailer. The header is the text "BEGIN"
// and each item's key; the trailer is the text "END" and each item's offset, length and CRC-32.
// `inner` must not have fixed names.
std::shared_ptr<const Format> framed_format(std::shared_ptr<const Format> inner);

// The header and the trailer that framed_format() writes around these items.
Bytes frame_header(std::span<const FileItem> items);
struct FramePlace {
  uint64_t offset = 0, length = 0;  // bytes
  uint32_t crc32 = 0;               // of the item
  friend bool operator==(const FramePlace&, const FramePlace&) = default;
};
Bytes frame_trailer(std::span<const FramePlace> places);

}  // namespace tilestone
