// NumPy's .npy files, version 1.0.
#pragma once

#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// The array description of a dtype: "<f4"; types that NumPy lacks (bfloat16, the 8-bit floats,
// complex32) are raw "|V1", "|V2", "|V4", to be viewed as what they are by the reader.
std::string npy_descr(DType dtype);
bool npy_has(DType dtype);  // false: written as raw bytes

// Writes a contiguous host tensor. Error(kIo) with the path and errno.
void write_npy(const std::string& path, const TensorView& tensor);

}  // namespace tilestone::cli
