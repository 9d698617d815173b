#include "tilestone/storage/private_map.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <algorithm>
#include <iterator>

#include "tilestone/storage/posix_internal.h"

namespace tilestone {
namespace {

constexpr int64_t kZfs = 0x2fc12fc1;
constexpr int64_t kBcachefs = 0xca451a4e;

// A page of a network file system may be needed when its server no longer answers.
bool is_local(int fd) {
  constexpr int64_t kLocal[] = {
      EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC, TMPFS_MAGIC, OVERLAYFS_SUPER_MAGIC,
      F2FS_SUPER_MAGIC, RAMFS_MAGIC,     SQUASHFS_MAGIC,    kZfs,        kBcachefs};
  struct statfs info;
  if (::fstatfs(fd, &info) != 0) return false;
  return std::find(std::begin(kLocal), std::end(kLocal), static_cast<int64_t>(info.f_type)) !=
         std::end(kLocal);
}

}  // namespace

std::shared_ptr<std::byte> map_private(const ReadableFile& file) {
  const auto* const posix = dynamic_cast<const PosixReadable*>(&file);
  const uint64_t size = file.size();
  if (posix == nullptr || size == 0 || !is_local(posix->fd())) return nullptr;
  void* const memory =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, posix->fd(), 0);
  if (memory == MAP_FAILED) return nullptr;  // NOLINT: the system's macro casts
  // What is not in the page cache is then read in huge pages, of which one fault maps each.
  ::madvise(memory, size, MADV_HUGEPAGE);
  return {static_cast<std::byte*>(memory), [size](std::byte* data) { ::munmap(data, size); }};
}

}  // namespace tilestone
