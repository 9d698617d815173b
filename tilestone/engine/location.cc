#include "tilestone/engine/location.h"

#include "tilestone/storage/posix_storage.h"

namespace tilestone {

Location::Location(const std::string& path) : storage_(posix_storage(path)) {}

}  // namespace tilestone
