// A 1-D tensor in device memory under a shape of more dims.
#pragma once

#include <memory>

#include "tilestone/state/tensor_view.h"

namespace tilestone::state_internal {

// The elements of `flat`, a 1-D tensor of numel(shape) elements of `itemsize` bytes, in C order
// under `shape`. A box that is narrowed to is read and written run by run.
std::shared_ptr<DeviceMemory> fold_memory(std::shared_ptr<DeviceMemory> flat, Dims shape,
                                          uint64_t itemsize);

}  // namespace tilestone::state_internal
