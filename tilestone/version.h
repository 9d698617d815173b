// Tilestone's version; CMake and the Python package read it from here.
#pragma once

namespace tilestone {

inline constexpr const char* kVersion = "0.1.0";

}  // namespace tilestone
