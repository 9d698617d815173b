// Texts for ranks and tensors in the error messages of planning.
#pragma once

#include <cstdint>
#include <string>

#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"

namespace tilestone {

// "rank 3"
inline std::string rank_text(int64_t rank) { return "rank " + std::to_string(rank); }

// "float32 [4, 8]"
inline std::string described(DType dtype, const Dims& shape) {
  return std::string(to_string(dtype)) + " " + to_string(shape);
}

// How messages of check_access() begin, as in Megatron-Core.
inline constexpr const char* kAccessPattern = "Invalid access pattern: ";

}  // namespace tilestone
