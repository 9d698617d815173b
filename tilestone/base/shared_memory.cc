// A file without a directory entry (memfd_create). Others reach it by its descriptor in /proc,
// whose link shows a random id: another process may have that number elsewhere.
#include "tilestone/base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "tilestone/base/uuid.h"

namespace tilestone {
namespace {

std::string target_of(const std::string& link) {
  std::array<char, 256> target{};
  const ssize_t size = ::readlink(link.c_str(), target.data(), target.size());
  return {target.data(), size < 0 ? 0 : static_cast<size_t>(size)};
}

}  // namespace

SharedMemory::SharedMemory(int fd, uint64_t bytes, std::string name)
    : fd_(fd), name_(std::move(name)) {
  const int access = name_.empty() ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const memory = bytes > 0 ? ::mmap(nullptr, bytes, access, MAP_SHARED, fd, 0) : MAP_FAILED;
  if (memory != MAP_FAILED) bytes_ = {static_cast<std::byte*>(memory), bytes};  // NOLINT: a cast
}

SharedMemory::~SharedMemory() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  if (!name_.empty()) ::close(fd_);
}

std::unique_ptr<SharedMemory> SharedMemory::make(uint64_t bytes) {
  rlimit limit{};
  // A file beyond the limit on files would end the program.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) return nullptr;
  const std::string id = random_uuid();
  const int fd = ::memfd_create(("tilestone-" + id).c_str(), MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  const std::string path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd);
  std::unique_ptr<SharedMemory> made(new SharedMemory(
      fd, ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? bytes : 0, path + " " + id));
  return made->bytes().empty() ? nullptr : std::move(made);
}

std::unique_ptr<SharedMemory> SharedMemory::find(const std::string& name) {
  const size_t space = name.find(' ');
  if (space == std::string::npos) return nullptr;
  const std::string path = name.substr(0, space);
  if (target_of(path) != "/memfd:tilestone-" + name.substr(space + 1) + " (deleted)") {
    return nullptr;
  }
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct stat info{};
  const bool is_known = ::fstat(fd, &info) == 0;
  std::unique_ptr<SharedMemory> found(
      new SharedMemory(fd, is_known ? static_cast<uint64_t>(info.st_size) : 0, ""));
  ::close(fd);  // a mapping needs none
  return found->bytes().empty() ? nullptr : std::move(found);
}

}  // namespace tilestone
