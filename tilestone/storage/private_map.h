// Files as writable memory that belongs to the process.
#pragma once

#include <cstddef>
#include <memory>

#include "tilestone/storage/storage.h"

namespace tilestone {

// The bytes of the file as a private mapping: no byte is read before it is touched, and what is
// written to it stays in this process. It lives as long as the result. If the file is shortened
// meanwhile, who touches what it has lost is ended by SIGBUS.
// Null where the bytes should be read instead: an empty file, one of another storage than a
// directory, and one on a file system that is not known to be local (network, FUSE).
std::shared_ptr<std::byte> map_private(const ReadableFile& file);

}  // namespace tilestone
