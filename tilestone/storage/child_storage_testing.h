// A directory of a storage as a storage of its own, for tests: puts the directory in front of each
// name.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

// For Storage::child(). Error(kUnsafe) for an unsafe name.
std::shared_ptr<Storage> child_storage(std::shared_ptr<Storage> base, const std::string& name);

// The same file in the storage beneath, if the storage is such a directory.
StorageEntry without_children(StorageEntry entry);

}  // namespace tilestone
