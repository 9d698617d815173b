// One file of a directory as a storage that has only this file.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// `name`: of a file directly in `directory`. For reading only: whatever would make, change or
// remove a file is Error(kAlreadyExists), because the location is a file and can't be a directory.
// `mark`: is listed, too, but is not a file; "": nothing is.
std::shared_ptr<Storage> one_file(std::shared_ptr<Storage> directory, std::string name,
                                  std::string mark = "");

Error refusal_of_file(const Storage& file);  // that error

// The directory and the name of the file of such a storage; nullopt: it is another storage.
std::optional<StorageEntry> entry_of_one_file(const Storage& storage);

}  // namespace tilestone
