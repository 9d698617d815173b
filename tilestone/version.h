// Tilestone's version; CMake and the Python package read it from here.
#pragma once

#include <string>

namespace tilestone {

inline constexpr const char* kVersion = "0.1.0";
// The writer that a checkpoint's metadata and manifest name.
inline std::string writer_name() { return std::string("Tilestone ") + kVersion; }

}  // namespace tilestone
