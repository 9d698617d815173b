// A storage of files in memory, for tests and simulated machines. The files exist as long as the
// object. Everything counts as durable at once; wrap it in a fault storage to lose unsynced bytes.
#pragma once

#include <memory>

#include "tilestone/base/file_image.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

std::shared_ptr<Storage> memory_storage(FileImage initial = {});
// A copy of the files in a memory storage. Error(kInvalidArgument) for any other kind of storage.
FileImage memory_image(Storage& storage);

}  // namespace tilestone
