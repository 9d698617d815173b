// For tests: the files of a memory storage.
#pragma once

#include "tilestone/storage/memory_storage.h"

namespace tilestone {

// A copy of the files. Error(kInvalidArgument) for any other kind of storage.
FileImage memory_image(Storage& storage);

}  // namespace tilestone
