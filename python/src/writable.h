// Checks that memory that a load or read will fill is writable. A write to read-only pages would
// end the process. numpy knows which of its arrays are read-only; torch does not.
#pragma once

#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::python {

// Throw Error(kInvalidArgument), with the key, if host memory is not mapped for writing.
void check_writable(const TensorView& target, const std::string& key);
void check_writable(const StateDict& wanted);  // reads the process's memory map once for all

}  // namespace tilestone::python
