#include "tilestone/storage/memory_storage_testing.h"

#include <mutex>

#include "tilestone/base/error.h"
#include "tilestone/storage/memory_internal.h"

namespace tilestone {

FileImage memory_image(Storage& storage) {
  const auto* memory = dynamic_cast<MemoryStorage*>(&storage);
  if (memory == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "memory_image needs a memory storage, not " + storage.describe());
  }
  FileImage image;
  for (const auto& [name, file] : memory->entries()) {
    std::lock_guard lock(file->mutex);
    image.emplace(name, file->data);
  }
  return image;
}

}  // namespace tilestone
