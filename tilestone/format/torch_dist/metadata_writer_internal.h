#pragma once

#include "tilestone/base/bytes.h"
#include "tilestone/state/metadata.h"

namespace tilestone::torch_dist {

// Encodes `.metadata` as torch 2.13 reads it. Deterministic.
Bytes write_metadata(const Metadata& metadata);

}  // namespace tilestone::torch_dist
