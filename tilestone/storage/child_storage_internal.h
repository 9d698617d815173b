// A directory of a storage as a storage of its own, by names with the directory in front.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

// As Storage::child, for storages that have nothing better. Error(kUnsafe) for an unsafe name.
std::shared_ptr<Storage> child_storage(std::shared_ptr<Storage> base, const std::string& name);

}  // namespace tilestone
