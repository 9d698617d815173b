// Files in memory, for tests and for simulating machines: nothing survives the object, and
// everything is "durable" at once (wrap it in a fault storage to lose what was not synced).
#pragma once

#include <memory>

#include "tilestone/base/file_image.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

std::shared_ptr<Storage> memory_storage(FileImage initial = {});
// A copy of what such a storage holds now. Error(kInvalidArgument) on another kind of storage.
FileImage memory_image(Storage& storage);

}  // namespace tilestone
