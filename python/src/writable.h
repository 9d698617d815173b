// Memory that a load or read is to fill: found out before the first write, which would end the
// process where it lies on read-only pages. numpy knows such arrays; torch does not.
#pragma once

#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::python {

// Throw Error(kInvalidArgument) with the key of host memory that may not be written.
void check_writable(const TensorView& target, const std::string& key);
void check_writable(const StateDict& wanted);  // one look at the process's memory for all

}  // namespace tilestone::python
