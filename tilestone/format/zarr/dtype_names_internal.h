// zarr v2's names of dtypes ("<f4", "|b1"). zarr has no name for bfloat16; Megatron-Core and
// tensorstore write "bfloat16".
#pragma once

#include <optional>
#include <string_view>

#include "tilestone/base/dtype.h"

namespace tilestone::zarr {

// The dtype's name in `.zarray`; nullopt: stock readers have no name for it.
std::optional<std::string_view> name_of(DType dtype);

// The dtype of a name in `.zarray`. Also knows tensorstore's names of 8-bit floats.
// Error(kUnsupported), without a file, for big-endian and all other types.
DType dtype_named(std::string_view name);

}  // namespace tilestone::zarr
