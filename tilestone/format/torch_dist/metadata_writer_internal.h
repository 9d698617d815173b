#pragma once

#include "tilestone/base/bytes.h"
#include "tilestone/state/metadata.h"

namespace tilestone::torch_dist {

// `.metadata` as torch 2.13 reads it. The same metadata gives the same bytes.
Bytes write_metadata(const Metadata& metadata);

}  // namespace tilestone::torch_dist
