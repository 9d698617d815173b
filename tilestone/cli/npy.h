// NumPy's .npy files, version 1.0.
#pragma once

#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// NumPy's description of a dtype, such as "<f4". Types that NumPy lacks (bfloat16, the 8-bit
// floats, complex32) are raw bytes, "|V1", "|V2" or "|V4", which the reader must reinterpret.
std::string npy_descr(DType dtype);
bool npy_has(DType dtype);  // false: NumPy lacks the type; it is written as raw bytes

// Writes a contiguous host tensor to a file, as write_file() does (output.h).
void write_npy(const std::string& path, const TensorView& tensor);

}  // namespace tilestone::cli
