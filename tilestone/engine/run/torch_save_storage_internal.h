// A file of torch.save as a storage (format/torch_save/torch_save.h says which files it shows).
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// `directory`: has the file `name`. `path`: of the file, which is mapped into memory when it is
// first used. For reading only, as one_file().
std::shared_ptr<Storage> torch_save_storage(std::shared_ptr<Storage> directory, std::string name,
                                            std::string path);

}  // namespace tilestone::engine
