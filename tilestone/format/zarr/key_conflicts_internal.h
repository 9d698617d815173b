// Keys whose arrays and objects would use the same path.
#pragma once

#include <span>
#include <string>

namespace tilestone::zarr {

struct NamedTensor {
  std::string key;
  size_t dims = 0;
};

// Error(kInvalidArgument) naming one of two keys whose files can't stand side by side: an array's
// directory where another's chunk or an object's file would be, and folders below such files.
// Keys have passed check_tensor_key() and check_object_key(). A key may be there more than once.
void check_conflicts(std::span<const NamedTensor> tensors, std::span<const std::string> objects);

}  // namespace tilestone::zarr
