// Replaces uring.cc if liburing is not available.
#include <cerrno>

#include "tilestone/storage/io_queue_internal.h"

namespace tilestone {

std::unique_ptr<IoQueue> make_uring_queue(unsigned, int& error) {
  error = ENOSYS;
  return nullptr;
}

}  // namespace tilestone
