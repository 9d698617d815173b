// One file of a directory as a storage that has only this file.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

// `name`: of a file directly in `directory`. For reading only: whatever would make, change or
// remove a file is Error(kAlreadyExists), because the location is a file and can't be a directory.
std::shared_ptr<Storage> one_file(std::shared_ptr<Storage> directory, std::string name);

}  // namespace tilestone
