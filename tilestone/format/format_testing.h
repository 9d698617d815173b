// Builds the bytes of a format's recipes in memory, as the engine streams them into files.
#pragma once

#include "tilestone/format/format.h"

namespace tilestone {

// The literal's bytes with the payload's CRC-32 inserted.
Bytes with_crc32(const Literal& literal, uint32_t crc);
// The item's bytes, including the padding before it. std::logic_error if their number differs from
// the recipe's.
Bytes render(const ItemRecipe& recipe);
// Wraps a format so that its data files have a header: the text "BEGIN" and each item's key.
// `inner` must not have fixed names.
std::shared_ptr<const Format> framed_format(std::shared_ptr<const Format> inner);

}  // namespace tilestone
