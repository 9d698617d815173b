#include "tilestone/storage/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

[[noreturn]] void fail(const std::string& path, const char* what, int error) {
  throw Error(error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo, what)
      .with_file(path)
      .with_errno(error);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(path, "cannot open the file", errno);
  struct stat info{};
  void* memory = nullptr;
  int error = ::fstat(file, &info) == 0 ? 0 : errno;
  if (error == 0 && !S_ISREG(info.st_mode)) error = EINVAL;
  if (error == 0 && info.st_size > 0) {
    size_ = static_cast<size_t>(info.st_size);
    memory = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {  // NOLINT: the system's macro casts
      error = errno;
      memory = nullptr;
    }
  }
  ::close(file);
  if (error != 0) fail(path, "cannot map the file", error);
  if (memory == nullptr) return;
  data_ = static_cast<const std::byte*>(memory);
  ::madvise(memory, size_, MADV_SEQUENTIAL);
}

MappedFile::~MappedFile() {
  // NOLINTNEXTLINE: munmap takes a mutable pointer.
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace tilestone
