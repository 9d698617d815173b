// Tilestone's version; CMake and the Python package read it from here.
#pragma once

#include <string_view>

namespace tilestone {

inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace tilestone
