// Opening names beneath a root directory that no symbolic link can lead out of.
#pragma once

#include <string>
#include <utility>

#include "tilestone/storage/system_internal.h"

namespace tilestone {

// An open file descriptor, closed with the object.
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

// Opens `name` beneath `root` (both without "..", `name` checked by the caller; "" is the root
// itself), close-on-exec. Symbolic links are followed where they stay beneath the root. An empty
// UniqueFd and errno on failure: EXDEV where a link leaves the root.
UniqueFd open_beneath(System& system, int root, const std::string& name, int flags,
                      unsigned mode = 0);

// The same without openat2: component by component, links followed by hand.
UniqueFd walk_beneath(int root, const std::string& name, int flags, unsigned mode);

// Opens the regular file to which a link `name` leads out of `root`, close-on-exec: any one, or one
// in a directory "blobs" beside the root or beside a directory above it. An empty UniqueFd and
// errno on failure: EXDEV where it is no such file.
UniqueFd open_linked(int root, const std::string& name, int flags, bool any);

// Clears O_NONBLOCK, which kept open() from waiting for a FIFO's other end: io_uring would answer
// EAGAIN instead of waiting for the disk. False and errno on failure.
bool clear_nonblocking(int fd);

}  // namespace tilestone
