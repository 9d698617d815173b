// The names of dtypes in safetensors headers ("BF16", "F8_E4M3").
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"

namespace tilestone::safetensors {

// nullopt: safetensors has no such dtype.
std::optional<std::string_view> name_of(DType dtype);

struct NamedDType {
  DType dtype = DType::kFloat32;
  // Elements of the header's shape per element of `dtype`, along the last dim: 2 for "F4", of which
  // torch has a dtype of pairs.
  int64_t packed = 1;
};
// nullopt: Tilestone has no dtype for the name.
std::optional<NamedDType> dtype_named(std::string_view name);

}  // namespace tilestone::safetensors
