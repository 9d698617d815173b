// What a format's recipes make, in memory, as the engine streams them into files.
#pragma once

#include "tilestone/format/format.h"

namespace tilestone {

// The literal with the payload's CRC-32 in its places.
Bytes with_crc32(const Literal& literal, uint32_t crc);
// The item's bytes, the padding before it included. std::logic_error where they are not as many as
// the recipe says.
Bytes render(const ItemRecipe& recipe);
// The CRC-32 of a whole item in memory, and of its payload.
ItemChecksums checksums_of(const ItemRecipe& recipe);

// Another format (no format of fixed names) whose data files have a header and a trailer: the text
// "BEGIN" and each item's key before the items, and "END", their places and lengths behind them.
std::shared_ptr<const Format> framed_format(std::shared_ptr<const Format> inner);

// What framed_format() writes around these items.
Bytes frame_header(std::span<const FileItem> items);
struct FramePlace {
  uint64_t offset = 0, length = 0;  // bytes
  uint32_t crc32 = 0;               // of the item
  friend bool operator==(const FramePlace&, const FramePlace&) = default;
};
Bytes frame_trailer(std::span<const FramePlace> places);

}  // namespace tilestone
