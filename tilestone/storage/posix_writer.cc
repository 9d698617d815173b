// How a file is written:
//
// Small files are written by plain calls through the page cache. Large files bypass it: each
// appended buffer, and aligned memory that the caller keeps, goes to DirectWrites without a copy,
// so up to `queue_depth` writes are in progress. The bytes after the last multiple of kAlignment,
// and everything appended after them, are written through the page cache when no direct write is in
// progress any more.
//
// Crash argument: nobody uses a file before its sync has returned. sync waits for all writes, cuts
// off the space that was reserved but not used, and calls fsync. fsync covers the bytes in the page
// cache, the file's length and extents, and the disk's own cache, where direct writes may still be.
// Before that, a crash may leave any length and any content.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/storage/direct_writes_internal.h"
#include "tilestone/storage/posix_internal.h"

namespace tilestone {
namespace {

// Bytes to reserve beyond the current end when a file becomes larger than expected.
constexpr uint64_t kMoreRoom = 16u << 20;

class PosixWriter : public WritableFile {
 public:
  PosixWriter(std::shared_ptr<PosixContext> context, std::string name, UniqueFd fd,
              uint64_t expected_size)
      : context_(std::move(context)),
        name_(std::move(name)),
        fd_(std::move(fd)),
        expected_size_(expected_size) {}

  void append(Buffer buffer) override {
    guarded([&] {
      const uint64_t size = buffer.size();
      if (size == 0) return;
      if (!chosen_) choose(std::max(expected_size_, size));
      const uint64_t whole = direct_ ? align_down(size, kAlignment) : 0;
      std::byte tail[kAlignment];
      const uint64_t tail_size = direct_ ? size - whole : 0;
      if (tail_size > 0) std::memcpy(tail, buffer.data() + whole, tail_size);
      if (whole > 0) {
        start(std::move(buffer), whole);
      } else if (!direct_) {
        write_cached(buffer.view());
      }
      if (tail_size > 0) {
        leave_direct();
        write_cached({tail, tail_size});
      }
    });
  }

  void append(ByteView bytes) override {
    guarded([&] {
      if (bytes.empty()) return;
      if (!chosen_) choose(0);
      if (direct_) leave_direct();
      write_cached(bytes);
    });
  }

  void append_kept(ByteView bytes, std::optional<uint32_t> /*crc32*/) override {
    guarded([&] {
      if (bytes.empty()) return;
      if (!chosen_) choose(std::max<uint64_t>(expected_size_, bytes.size()));
      const bool aligned = reinterpret_cast<uintptr_t>(bytes.data()) % kAlignment == 0 &&
                           bytes.size() % kAlignment == 0 && size_ % kAlignment == 0;
      if (direct_ && aligned) {
        make_room(size_ + bytes.size());
        writes().start(bytes, size_);
        size_ += bytes.size();
      } else {
        if (direct_) leave_direct();
        write_cached(bytes);
      }
    });
  }

  void sync(Deadline deadline) override {
    guarded([&] {
      if (deadline.expired()) {
        throw Error(ErrorCode::kTimeout, "the deadline passed before a file was synced")
            .with_file(path());
      }
      finish_all();
      cut();
      if (context_->system().fsync(fd_.get()) != 0) fail_errno("cannot sync a file", path(), errno);
    });
  }

  void close() override {
    guarded([&] {
      finish_all();
      cut();
      writes_.reset();
      // On EINTR too, Linux has closed the descriptor.
      if (context_->system().close(fd_.release()) != 0 && errno != EINTR) {
        fail_errno("cannot close a file", path(), errno);
      }
    });
  }

  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

 private:
  std::string path() const { return context_->path_of(name_); }

  // Runs one operation. The first failure is kept, and every later operation throws it again,
  // because the file's content is unknown from then on.
  template <typename Step>
  void guarded(const Step& step) {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    if (!fd_) throw Error(ErrorCode::kInvalidArgument, "the file is closed").with_file(path());
    try {
      step();
    } catch (...) {
      failure_ = std::current_exception();
      writes_.reset();
      throw;
    }
  }

  // Decides how to write the file. Called before the first bytes are written.
  void choose(uint64_t size) {
    chosen_ = true;
    // FUSE file systems over object stores accept a file's bytes only in order. Direct writes, of
    // which several are in progress at a time, would break that order.
    direct_ = size >= context_->options().direct_write && !context_->system().is_fuse(fd_.get()) &&
              context_->make_direct(fd_.get());
    if (direct_ && expected_size_ > 0) reserve();
  }

  // Reserves space for the whole file, in few extents, so that a full disk is detected before
  // anything is written. Any other failure means that this file system can't reserve space. The
  // reservation also sets the file's length: ext4 and XFS run direct writes that lengthen a file
  // one after the other.
  void reserve() {
    lengthened_ = true;
    if (context_->system().reserve(fd_.get(), expected_size_) == 0) {
      reserved_ = expected_size_;
    } else if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO) {
      fail_errno("cannot reserve " + std::to_string(expected_size_) + " bytes", path(), errno);
    }
  }

  // Reserves more space if the reservation ends before `end`. Does nothing if nothing was reserved.
  // Failures are ignored: if the disk is full, the write itself fails.
  void make_room(uint64_t end) {
    if (reserved_ == 0 || end <= reserved_) return;
    if (context_->system().reserve(fd_.get(), end + kMoreRoom) == 0) reserved_ = end + kMoreRoom;
  }

  // Cuts the file to the bytes written. Even a failed reservation may have lengthened the file.
  void cut() {
    if (lengthened_ && context_->system().ftruncate(fd_.get(), size_) != 0) {
      fail_errno("cannot truncate a file to " + std::to_string(size_) + " bytes", path(), errno);
    }
    lengthened_ = false;
    reserved_ = 0;
  }

  // Starts a direct write of the first `size` bytes of the buffer.
  void start(Buffer buffer, uint64_t size) {
    make_room(size_ + size);
    writes().start(std::move(buffer), size_, size);
    size_ += size;
  }

  DirectWrites& writes() {
    if (writes_ == nullptr) {
      writes_ = std::make_unique<DirectWrites>(context_, path(), fd_.get());
    }
    return *writes_;
  }

  void finish_all() {
    if (writes_ != nullptr) writes_->finish();
  }

  void leave_direct() {
    finish_all();
    writes_.reset();
    direct_ = false;
    if (context_->system().set_direct(fd_.get(), false) != 0) {
      fail_errno("cannot turn off direct I/O", path(), errno);
    }
  }

  void write_cached(ByteView bytes) {
    write_at(context_->system(), fd_.get(), path(), bytes, size_);
    size_ += bytes.size();
  }

  std::shared_ptr<PosixContext> context_;
  std::string name_;
  UniqueFd fd_;
  uint64_t expected_size_;
  uint64_t size_ = 0;        // bytes appended
  uint64_t reserved_ = 0;    // bytes of space reserved, from the start of the file
  bool lengthened_ = false;  // the file may be longer than size_
  bool chosen_ = false;
  bool direct_ = false;
  std::unique_ptr<DirectWrites> writes_;  // declared after fd_: its destructor waits for writes
  std::exception_ptr failure_;
};

}  // namespace

std::unique_ptr<WritableFile> posix_writer(std::shared_ptr<PosixContext> context, std::string name,
                                           UniqueFd fd, uint64_t expected_size) {
  return std::make_unique<PosixWriter>(std::move(context), std::move(name), std::move(fd),
                                       expected_size);
}

}  // namespace tilestone
