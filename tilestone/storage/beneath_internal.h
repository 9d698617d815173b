// Opens names beneath a root directory. No symbolic link can lead out of the root.
#pragma once

#include <string>
#include <utility>

#include "tilestone/storage/system_internal.h"

namespace tilestone {

// Owns an open file descriptor and closes it.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd();

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Opens `name` beneath the open directory `root`, close-on-exec. The caller has checked `name`: it
// has no ".."; "" is the root itself. Follows symbolic links that stay beneath the root. On failure
// returns an empty UniqueFd and sets errno: EXDEV if a link leaves the root.
UniqueFd open_beneath(System& system, int root, const std::string& name, int flags,
                      unsigned mode = 0);

// Does the same without openat2: opens one component after the other and follows links itself.
UniqueFd walk_beneath(int root, const std::string& name, int flags, unsigned mode);

// Opens, close-on-exec, the regular file that a link `name` outside of `root` leads to. With `any`,
// every regular file is allowed; else only one beneath the root, to which an absolute link may lead
// back, and one in a directory "blobs" next to the root or next to a directory above it. On failure
// returns an empty UniqueFd and sets errno: EXDEV if the file is not allowed.
UniqueFd open_linked(int root, const std::string& name, int flags, bool any);

// Clears O_NONBLOCK, which was set so that open() did not wait for the other end of a FIFO. With
// it, io_uring would return EAGAIN instead of waiting for the disk. On failure returns false and
// sets errno.
bool clear_nonblocking(int fd);

}  // namespace tilestone
