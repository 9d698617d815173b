// Helpers for tests of saves that are staged in a directory beside their location.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// PyTorch's dialect with Megatron-Core's describing files, `common.pt` and `metadata.json` (zarr
// has its own), both of which name the state's "step".
std::shared_ptr<const Dialect> fixed_names_dialect();

// The "step" of the save of which common.pt, and metadata.json, are; 0: neither is there. Anything
// else is a failure of the test.
int64_t step_of_fixed_names(Storage& storage);

}  // namespace tilestone
