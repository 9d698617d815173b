// Files in memory.
#pragma once

#include <map>
#include <string>

#include "tilestone/base/bytes.h"

namespace tilestone {

// Maps file names to the files' contents.
using FileImage = std::map<std::string, Bytes>;

}  // namespace tilestone
