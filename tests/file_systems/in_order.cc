// Preloaded into bindfs (LD_PRELOAD), so that its files accept bytes only at their end, as those of
// FUSE file systems over object stores do.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

extern "C" {

ssize_t pwrite64(int file, const void* bytes, size_t size, off64_t offset) {
  using Function = ssize_t (*)(int, const void*, size_t, off64_t);
  static const auto next = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "pwrite64"));
  struct stat info;
  if (::fstat(file, &info) != 0) return -1;
  if (offset != info.st_size) {
    errno = ESPIPE;
    return -1;
  }
  return next(file, bytes, size, offset);
}

ssize_t pwrite(int file, const void* bytes, size_t size, off_t offset) {
  return pwrite64(file, bytes, size, offset);
}

}  // extern "C"
