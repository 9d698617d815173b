// The zarr backend of Megatron-Core up to 0.15, read and written without the zarr package. Each
// tensor is a zarr v2 array; each chunk and each object is a file. docs/formats/zarr.md specifies
// the format.
#pragma once

#include <memory>

#include "tilestone/format/format.h"

namespace tilestone {

std::shared_ptr<const Format> zarr_format();

}  // namespace tilestone
