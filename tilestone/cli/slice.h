// Slices as a person types them.
#pragma once

#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// "0:4,:" over `shape` as a box: one part a dim, separated by commas; missing parts and ":" mean
// the whole dim, "3" means 3:4 (the dim stays), negative numbers count from the end, ends beyond
// the dim are cut. Error(kInvalidArgument) on anything else; steps are not supported.
Box parse_slice(const std::string& text, const Dims& shape);

}  // namespace tilestone::cli
