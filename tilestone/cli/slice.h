// Parses slices that a user types.
#pragma once

#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// The box of a slice such as "0:4,:" of a tensor of `shape`. A slice has one part per dim,
// separated by commas. A missing part and ":" mean the whole dim. "3" means 3:4, so the dim stays.
// Negative numbers count from the end. Ends beyond the dim are clamped. Anything else, also a step,
// is Error(kInvalidArgument).
Box parse_slice(const std::string& text, const Dims& shape);

}  // namespace tilestone::cli
