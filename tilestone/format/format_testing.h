// What a format's recipes make, in memory, as the engine streams them into files.
#pragma once

#include "tilestone/format/format.h"

namespace tilestone {

// The literal with the payload's CRC-32 in its places.
Bytes with_crc32(const Literal& literal, uint32_t crc);
// The item's bytes, the padding before it included. std::logic_error where they are not as many as
// the recipe says.
Bytes render(const ItemRecipe& recipe);

}  // namespace tilestone
