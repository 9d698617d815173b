// The queue over io_uring. If liburing is not available, CMake builds no_uring.cc instead.
#include <liburing.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/storage/io_queue_internal.h"

namespace tilestone {
namespace {

[[noreturn]] void fail(const char* what, int error) {
  throw Error(ErrorCode::kIo, what).with_errno(error);
}

class UringQueue : public IoQueue {
 public:
  ~UringQueue() override {
    if (ready_) io_uring_queue_exit(&ring_);
  }

  // Returns 0 or an errno.
  int start(unsigned depth) {
    const int result = io_uring_queue_init(depth, &ring_, 0);
    ready_ = result == 0;
    return -result;
  }

  void submit(const IoRequest& request) override {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) throw Error(ErrorCode::kInternal, "the io_uring queue is full");
    const auto size = static_cast<unsigned>(request.size);
    if (request.kind == IoRequest::Kind::kRead) {
      io_uring_prep_read(sqe, request.fd, request.data, size, request.offset);
    } else {
      io_uring_prep_write(sqe, request.fd, request.data, size, request.offset);
    }
    io_uring_sqe_set_data64(sqe, request.tag);
    int result;
    do {
      result = io_uring_submit(&ring_);
    } while (result == -EINTR || result == -EAGAIN || result == -EBUSY);
    if (result < 0) fail("io_uring_submit failed", -result);
  }

  IoResult wait() override {
    io_uring_cqe* cqe = nullptr;
    int result;
    do {
      result = io_uring_wait_cqe(&ring_, &cqe);
    } while (result == -EINTR || result == -EAGAIN);
    if (result < 0) fail("io_uring_wait_cqe failed", -result);
    const IoResult answer{io_uring_cqe_get_data64(cqe), cqe->res};
    io_uring_cqe_seen(&ring_, cqe);
    return answer;
  }

 private:
  io_uring ring_{};
  bool ready_ = false;
};

}  // namespace

std::unique_ptr<IoQueue> make_uring_queue(unsigned depth, int& error) {
  auto queue = std::make_unique<UringQueue>();
  error = queue->start(depth);
  if (error != 0) return nullptr;
  return queue;
}

}  // namespace tilestone
