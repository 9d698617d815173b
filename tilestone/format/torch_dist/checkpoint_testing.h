// Writes a whole checkpoint with a format's own functions into memory, as one rank would.
#pragma once

#include <string>

#include "tilestone/format/format.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/storage/memory_storage.h"

namespace tilestone::torch_dist {

// The item's bytes, padding included.
Bytes with_crc32(const Literal& literal, uint32_t crc);  // the literal with it put in
Bytes render(const ItemRecipe& recipe);

// The files of a checkpoint of `state`.
FileImage write_checkpoint(const Format& format, const StateDict& state,
                           const std::string& save_id);

}  // namespace tilestone::torch_dist
