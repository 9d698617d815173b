#include "tilestone/storage/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "tilestone/base/error.h"
#include "tilestone/storage/beneath_internal.h"

namespace tilestone {

MappedFile::MappedFile(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) fail_errno("cannot open the file", path, errno);
  struct stat info{};
  if (::fstat(file.get(), &info) != 0) fail_errno("cannot map the file", path, errno);
  if (!S_ISREG(info.st_mode)) fail_errno("cannot map the file", path, EINVAL);
  if (info.st_size == 0) return;
  size_ = static_cast<size_t>(info.st_size);
  void* const memory = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
  // NOLINTNEXTLINE: the system's macro casts.
  if (memory == MAP_FAILED) fail_errno("cannot map the file", path, errno);
  data_ = static_cast<const std::byte*>(memory);
  ::madvise(memory, size_, MADV_SEQUENTIAL);
}

MappedFile::~MappedFile() {
  // NOLINTNEXTLINE: munmap takes a mutable pointer.
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace tilestone
