// zarr v2's names of element types: "<f4", "|b1", and "bfloat16", which Megatron-Core and
// tensorstore write in the place of one.
#pragma once

#include <optional>
#include <string_view>

#include "tilestone/base/dtype.h"

namespace tilestone::zarr {

// What `.zarray` calls the dtype; nullopt: stock readers have no name for it.
std::optional<std::string_view> name_of(DType dtype);

// Inverse of name_of(), plus tensorstore's names of 8-bit floats. Errors without file:
// kUnsupported for big-endian, structured and all other types.
DType dtype_named(std::string_view name);

}  // namespace tilestone::zarr
