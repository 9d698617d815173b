// A file of the file system as memory.
#pragma once

#include <memory>
#include <string>

#include "tilestone/base/bytes.h"

namespace tilestone {

// The bytes of a regular file, mapped for reading. The memory belongs to the page cache: the system
// takes it back when it needs it. The file must not be cut while it is mapped.
class MappedFile {
 public:
  // Error(kNotFound, kIo), with the path.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  ByteView bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tilestone
