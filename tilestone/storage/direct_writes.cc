#include "tilestone/storage/direct_writes_internal.h"

#include <algorithm>
#include <cerrno>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"

namespace tilestone {
namespace {

[[noreturn]] void fail_write(const std::string& path, uint64_t size, uint64_t offset, int error) {
  fail_errno("cannot write " + std::to_string(size) + " bytes at offset " + std::to_string(offset),
             path, error);
}

}  // namespace

void write_at(System& system, int fd, const std::string& path, ByteView bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n =
        system.pwrite(fd, bytes.data(), std::min(bytes.size(), IoQueue::kMaxRequest), offset);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) fail_write(path, bytes.size(), offset, n < 0 ? errno : EIO);
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
}

DirectWrites::DirectWrites(std::shared_ptr<PosixContext> context, std::string path, int fd)
    : context_(std::move(context)),
      path_(std::move(path)),
      fd_(fd),
      queue_(context_->take_queue()),
      slots_(context_->options().queue_depth),
      reaper_([this] { reap(); }) {}

DirectWrites::~DirectWrites() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  reaper_.join();
  if (failure_ == nullptr) context_->give_back(std::move(queue_));
}

void DirectWrites::start(Buffer buffer, uint64_t offset, uint64_t size) {
  const std::byte* const data = buffer.data();
  start({std::move(buffer), data, offset, size, 0});
}

void DirectWrites::start(ByteView kept, uint64_t offset) {
  start({Buffer(), kept.data(), offset, kept.size(), 0});
}

void DirectWrites::start(WriteSlot slot) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return under_way_ < slots_.size(); });
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  const auto free = std::find_if(slots_.begin(), slots_.end(),
                                 [](const WriteSlot& other) { return other.data == nullptr; });
  *free = std::move(slot);
  submit(static_cast<size_t>(free - slots_.begin()));
  changed_.notify_all();
}

void DirectWrites::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return under_way_ == 0; });
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

// If wait() throws, the exception leaves the thread and so ends the process. This is intended: the
// kernel may still be reading buffers, and nobody could keep them alive.
void DirectWrites::reap() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || under_way_ > 0; });
    if (under_way_ == 0) return;
    lock.unlock();
    const IoResult result = queue_->wait();
    lock.lock();
    try {
      handle(result);
    } catch (...) {
      slots_[result.tag] = WriteSlot();
      if (failure_ == nullptr) failure_ = std::current_exception();
    }
    changed_.notify_all();
  }
}

void DirectWrites::submit(size_t index) {
  const WriteSlot& slot = slots_[index];
  // The const_cast is safe: the kernel only reads from this memory.
  queue_->submit({IoRequest::Kind::kWrite, fd_, const_cast<std::byte*>(slot.data) + slot.done,
                  std::min<uint64_t>(slot.size - slot.done, IoQueue::kMaxRequest),
                  slot.offset + slot.done, index});
  ++under_way_;
}

// Submits a slot again if bytes of it are still unwritten.
void DirectWrites::handle(const IoResult& result) {
  --under_way_;
  WriteSlot& slot = slots_[result.tag];
  int error = result.result < 0 ? static_cast<int>(-result.result) : 0;
  const bool again = error == EINTR || error == EAGAIN;
  if (result.result > 0) {
    // After a short write, continue at the last aligned offset, so that a few bytes are written
    // twice. A write that makes no progress this way would be repeated forever: it is an error.
    const uint64_t before = slot.done;
    slot.done += static_cast<uint64_t>(result.result);
    if (slot.done < slot.size) slot.done = align_down(slot.done, kAlignment);
    if (slot.done == before) error = EINVAL;
  }
  if (slot.done < slot.size && (again || error == 0) && result.result != 0 && failure_ == nullptr) {
    submit(result.tag);
    return;
  }
  const WriteSlot ended = std::move(slot);
  slot = WriteSlot();
  finished(ended, error);
}

void DirectWrites::finished(const WriteSlot& slot, int error) {
  if (slot.done == slot.size || failure_ != nullptr) return;
  if (error != EINVAL) {
    fail_write(path_, slot.size - slot.done, slot.offset + slot.done, error == 0 ? EIO : error);
  }
  // The file system accepted O_DIRECT but not this write. This write and all later ones go through
  // the page cache. Other writes in progress end either way.
  context_->note_no_direct(EINVAL);
  if (context_->system().set_direct(fd_, false) != 0) {
    fail_errno("cannot turn off direct I/O", path_, errno);
  }
  write_at(context_->system(), fd_, path_, {slot.data + slot.done, slot.size - slot.done},
           slot.offset + slot.done);
}

}  // namespace tilestone
