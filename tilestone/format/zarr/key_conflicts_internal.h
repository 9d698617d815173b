// Finds keys whose arrays and objects would use the same path.
#pragma once

#include <span>
#include <string>

namespace tilestone::zarr {

struct NamedTensor {
  std::string key;
  size_t dims = 0;
};

// Error(kInvalidArgument), naming one of the keys, if the files of two keys exclude each other: one
// key needs a directory whose path is the file of an object or of another array's chunk. The keys
// must have passed check_tensor_key() and check_object_key(). A key may occur more than once.
void check_conflicts(std::span<const NamedTensor> tensors, std::span<const std::string> objects);

}  // namespace tilestone::zarr
