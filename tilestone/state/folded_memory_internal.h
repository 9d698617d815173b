// Presents a 1-D tensor in device memory under a shape with more dims.
#pragma once

#include <memory>

#include "tilestone/state/tensor_view.h"

namespace tilestone::state_internal {

// The elements of `flat`, in C order, under `shape`. `flat` is a 1-D tensor of numel(shape)
// elements of `itemsize` bytes. A narrowed box is read and written one contiguous run at a time.
std::shared_ptr<DeviceMemory> fold_memory(std::shared_ptr<DeviceMemory> flat, Dims shape,
                                          uint64_t itemsize);

}  // namespace tilestone::state_internal
