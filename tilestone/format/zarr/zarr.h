// The zarr backend of Megatron-Core up to 0.15: one zarr v2 array for each tensor, a file for each
// chunk and each object, read and written without the zarr package. The spec is
// docs/formats/zarr.md.
#pragma once

#include <memory>

#include "tilestone/format/format.h"

namespace tilestone {

std::shared_ptr<const Format> zarr_format();

}  // namespace tilestone
