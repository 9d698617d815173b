// Files in memory.
#pragma once

#include <map>
#include <string>

#include "tilestone/base/bytes.h"

namespace tilestone {

// The content of files, by name.
using FileImage = std::map<std::string, Bytes>;

}  // namespace tilestone
