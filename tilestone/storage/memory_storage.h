// A storage of files in memory: a location for programs that check their own saves and loads
// without a disk. The files exist as long as the object. Everything counts as durable at once.
#pragma once

#include <memory>

#include "tilestone/base/file_image.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

std::shared_ptr<Storage> memory_storage(FileImage initial = {});
}  // namespace tilestone
