// How a batch of ops is read:
//
// Each op is cut into blocks (read_batch_internal.h), which the workers take one after the other.
// Each worker has its own queue with up to `queue_depth` blocks in progress. How a block is read:
//   - A block in the page cache is copied at once by a plain call. For a small block, that call
//     must not wait. For a large block, the worker first checks that all of it is cached.
//   - A block to be kept in the page cache (CachePolicy::kKeep) is first read into the page cache
//     and then copied. In a very large op it is read into large folios, from which later loads copy
//     faster. Plain reads would get small folios and no read-ahead, because the file is opened for
//     random access. The call that does it waits for the disk, so helper threads make it for
//     several blocks at a time. In other ops the worker asks the kernel for several blocks in
//     advance, so that the disk has work.
//   - Any other small block is read through the page cache by the queue.
//   - Any other large block is read by direct I/O. If the file range and the memory have the same
//     alignment, it is read into the target. Otherwise an aligned range that includes it is read
//     into a pooled buffer and copied.
// The worker that finishes the last block of an op calls `done`. After a failure no worker takes a
// new block. Each worker waits for its blocks in progress, because the kernel writes to their
// memory.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <optional>
#include <system_error>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/read_batch_internal.h"
#include "tilestone/storage/read_ops_internal.h"

namespace tilestone {
namespace {

constexpr uint64_t kSmallBlock = 64u << 10;  // bytes
constexpr size_t kPopulating = 8;            // blocks that all workers populate at a time
constexpr uint64_t kCrcBlock = 256u << 10;   // bytes; stays in cache from the read to the checksum

// The work of one thread on a batch.
class ReadWorker {
 public:
  // `workers`: how many work on the batch.
  ReadWorker(ReadBatch& batch, size_t workers)
      : batch_(batch),
        context_(batch.context()),
        slots_(context_.options().queue_depth),
        populated_(kPopulating / workers) {}

  void run() {
    try {
      while (fill() || under_way_ > 0 || !asked_.empty() || populating_ > 0) {
        if (under_way_ > 0) {
          finish_one();
        } else if (!asked_.empty()) {
          finish_asked();
        } else if (populating_ > 0) {
          finish_populated();
        }
      }
    } catch (...) {
      batch_.stop();
      drain();
      throw;
    }
    if (queue_ != nullptr) context_.give_back(std::move(queue_));
  }

 private:
  // A request to read bytes [offset, offset + size) of the file to `data`. It is complete when the
  // first `needed` bytes are read, because an aligned range may extend beyond the end of the file.
  struct ReadSlot {
    bool busy = false;
    bool direct = false;
    PartialRead block;
    Buffer buffer;
    int fd = -1;
    std::byte* data = nullptr;
    uint64_t offset = 0, size = 0, needed = 0, done = 0;
    // The checksums, if computed while the block was read.
    std::optional<BlockCrcs> crcs = std::nullopt;
  };

  const PosixReadable& file(const PartialRead& block) const {
    return static_cast<const PosixReadable&>(*batch_.op(block.op).file);
  }

  // The address of the block in the op's target; null if the op has no target or is prefetched.
  std::byte* place(const PartialRead& block) const {
    const ReadOp& op = batch_.op(block.op);
    const bool nowhere = op.target == nullptr || batch_.prefetches();
    return nowhere ? nullptr : op.target + (block.begin - op.offset);
  }

  // Starts blocks until the queue is full. Returns false if no block is left to start.
  bool fill() {
    while (under_way_ < slots_.size()) {
      if (batch_.options().deadline.expired()) {
        throw Error(ErrorCode::kTimeout, "the deadline passed while reading");
      }
      if (!waiting_.has_value()) waiting_ = batch_.take();
      if (!waiting_.has_value()) return false;
      if (!start(*waiting_)) return true;
      waiting_.reset();
    }
    return true;
  }

  // Returns false if the block must wait for a buffer of which this worker may be the holder.
  bool start(const PartialRead& block) {
    if (batch_.prefetches()) return start_prefetch(block);
    const bool targeted = place(block) != nullptr || block.size() == 0;
    Buffer buffer;
    if (!targeted && !get_buffer(buffer)) return false;
    if (copied_from_cache(block, buffer)) return true;
    const bool resident = block.size() == 0 || in_page_cache(block);
    if (!resident && batch_.keeps()) {
      if (!targeted || !batch_.wants_large_folios(block)) return ask(block);
      populate(block);
      return true;
    }
    const bool direct = !resident && wants_direct(block);
    const bool straight = targeted && block.begin % kAlignment == 0 &&
                          block.end % kAlignment == 0 &&
                          reinterpret_cast<uintptr_t>(place(block)) % kAlignment == 0;
    const bool bounced = direct && !straight && fits_buffer(block);
    if (bounced && !buffer && !get_buffer(buffer)) return false;
    if (direct && straight) {
      start_direct(block, Buffer(), place(block), block.begin, block.end);
    } else if (bounced) {
      std::byte* const memory = buffer.data();
      start_direct(block, std::move(buffer), memory, align_down(block.begin, kAlignment),
                   align_up(block.end, kAlignment));
    } else {
      start_cached(block, std::move(buffer), resident);
    }
    return true;
  }

  // Asks the kernel for the block at once, so that the disk has work. finish_asked_prefetch() waits
  // for it.
  bool start_prefetch(const PartialRead& block) {
    if (block.size() == 0 || is_cached(block)) return true;
    if (!ask(block)) return false;
    batch_.fetches(block);
    return true;
  }

  // Asks the kernel to read the block into the page cache. If too many blocks have been asked for,
  // finishes the oldest first. Returns false if that must wait for a buffer.
  bool ask(const PartialRead& block) {
    if (asked_.size() == slots_.size() && !finish_asked()) return false;
    context_.system().will_need(file(block).fd(), block.begin, block.size());
    asked_.push_back(block);
    return true;
  }

  // Has the block read into large folios. If too many are, first finishes one.
  void populate(const PartialRead& block) {
    if (!has_populator()) {
      context_.system().populate_large_folios(file(block).fd(), block.begin, block.size());
      return start_cached(block, Buffer(), true);
    }
    if (populating_ == populated_.size()) finish_populated();
    const auto free = std::find(populated_.begin(), populated_.end(), std::nullopt);
    *free = block;
    ++populating_;
    populator_->submit({IoRequest::Kind::kPopulate, file(block).fd(), nullptr, block.size(),
                        block.begin, static_cast<uint64_t>(free - populated_.begin())});
  }

  // False where this worker's share of kPopulating is one block or less, or no thread can be
  // started.
  bool has_populator() {
    if (populated_.size() <= 1) return false;
    if (populator_ != nullptr) return true;
    try {
      populator_ = make_thread_queue(context_.system(), static_cast<unsigned>(populated_.size()));
    } catch (const std::system_error&) {
      populated_.clear();
    }
    return populator_ != nullptr;
  }

  // Waits until a block is in the page cache, and copies it. If it could not be read, the copy
  // reports the error.
  void finish_populated() {
    const PartialRead block = *std::exchange(populated_[populator_->wait().tag], std::nullopt);
    --populating_;
    start_cached(block, Buffer(), true);
  }

  // Reads or waits for the block that was asked for first. Returns false if that must wait for a
  // buffer.
  bool finish_asked() {
    return batch_.prefetches() ? finish_asked_prefetch() : finish_asked_read();
  }

  bool finish_asked_read() {
    const PartialRead block = asked_.front();
    Buffer buffer;
    if (place(block) == nullptr && !get_buffer(buffer)) return false;
    asked_.pop_front();
    start_cached(block, std::move(buffer), true);
    return true;
  }

  // If populate is not supported or fails, the block is read into a buffer instead.
  bool finish_asked_prefetch() {
    const PartialRead& block = asked_.front();
    if (context_.system().populate(file(block).fd(), block.begin, block.size()) != 0) {
      Buffer buffer;
      if (!get_buffer(buffer)) return false;
      start_cached(block, std::move(buffer), false);
    }
    asked_.pop_front();
    return true;
  }

  bool fits_buffer(const PartialRead& block) const {
    const auto& pool = batch_.options().buffers;
    return pool != nullptr &&
           align_up(block.end, kAlignment) - align_down(block.begin, kAlignment) <=
               align_down(pool->buffer_bytes(), kAlignment);
  }

  // Gets a free buffer. Returns false, without blocking, if there is none and this worker has
  // blocks in progress: all other threads may be waiting for the buffers that it holds.
  bool get_buffer(Buffer& buffer) {
    buffer = batch_.options().buffers->try_acquire();
    if (!buffer && under_way_ > 0) return false;
    if (!buffer) buffer = batch_.options().buffers->acquire(batch_.options().deadline);
    return true;
  }

  bool wants_direct(const PartialRead& block) {
    return block.size() >= context_.options().direct_read && file(block).direct_fd() >= 0;
  }

  // Reads a small block if all of it is in the page cache, else returns false. The system call
  // neither waits nor starts I/O.
  bool copied_from_cache(const PartialRead& block, const Buffer& buffer) {
    if (block.size() == 0 || block.size() >= kSmallBlock) return false;
    std::byte* const data = buffer ? buffer.data() : place(block);
    const ssize_t n =
        context_.system().read_cached(file(block).fd(), data, block.size(), block.begin);
    if (n < 0 || static_cast<uint64_t>(n) < block.size()) return false;
    const ByteView bytes(data, block.size());
    BlockCrcs crcs(batch_.op(block.op), block);
    if (batch_.wants_crc(block)) crcs.add(bytes);
    batch_.finished(block, bytes, crcs);
    return true;
  }

  bool in_page_cache(const PartialRead& block) {
    return block.size() >= kSmallBlock && is_cached(block);
  }

  bool is_cached(const PartialRead& block) {
    uint64_t cached = 0;
    const uint64_t begin = align_down(block.begin, kAlignment);
    const uint64_t size = align_up(block.end, kAlignment) - begin;
    return context_.cached_bytes(file(block).fd(), begin, block.end - begin, cached) == 0 &&
           cached >= size;
  }

  ReadSlot& free_slot() {
    return *std::find_if(slots_.begin(), slots_.end(), [](const ReadSlot& s) { return !s.busy; });
  }

  void start_direct(const PartialRead& block, Buffer buffer, std::byte* data, uint64_t begin,
                    uint64_t end) {
    ReadSlot& slot = free_slot();
    slot = {.direct = true,
            .block = block,
            .buffer = std::move(buffer),
            .fd = file(block).direct_fd(),
            .data = data,
            .offset = begin,
            .size = end - begin,
            .needed = block.end - begin};
    submit_new(slot);
  }

  // Reads through the page cache: at once if `resident`, else by the queue.
  void start_cached(const PartialRead& block, Buffer buffer, bool resident) {
    ReadSlot& slot = free_slot();
    std::byte* const data = buffer ? buffer.data() : place(block);
    slot = {.block = block,
            .buffer = std::move(buffer),
            .fd = file(block).fd(),
            .data = data,
            .offset = block.begin,
            .size = block.size(),
            .needed = block.size()};
    if (resident) {
      read_now(slot);
      complete(slot);
    } else {
      submit_new(slot);
    }
  }

  void submit_new(ReadSlot& slot) {
    if (queue_ == nullptr) queue_ = context_.take_queue();
    submit(slot);
  }

  void submit(ReadSlot& slot) {
    queue_->submit({IoRequest::Kind::kRead, slot.fd, slot.data + slot.done,
                    std::min<uint64_t>(slot.size - slot.done, IoQueue::kMaxRequest),
                    slot.offset + slot.done, static_cast<uint64_t>(&slot - slots_.data())});
    slot.busy = true;
    ++under_way_;
  }

  // Waits for one result. Submits the slot again if it still needs bytes.
  void finish_one() {
    const IoResult result = queue_->wait();
    --under_way_;
    ReadSlot& slot = slots_[result.tag];
    slot.busy = false;
    const bool again = result.result == -EINTR || result.result == -EAGAIN;
    if (result.result > 0) slot.done += static_cast<uint64_t>(result.result);
    if (again || (result.result > 0 && slot.done < slot.needed && slot.done % kAlignment == 0)) {
      submit(slot);
      return;
    }
    if (result.result == -EINVAL && slot.direct) {
      context_.note_no_direct(EINVAL);
      file(slot.block).forget_direct();
    } else if (result.result < 0) {
      fail_read(slot, static_cast<int>(-result.result));
    } else if (result.result == 0) {
      fail_beyond_end(batch_.op(slot.block.op), slot.offset + slot.done);
    }
    read_now(slot);
    complete(slot);
  }

  [[noreturn]] void fail_read(const ReadSlot& slot, int error) const {
    fail_errno("cannot read " + std::to_string(slot.needed - slot.done) + " bytes at offset " +
                   std::to_string(slot.offset + slot.done),
               context_.path_of(file(slot.block).name()), error);
  }

  // Reads the bytes that the slot still needs through the page cache.
  void read_now(ReadSlot& slot) {
    const bool whole = slot.done == 0 && slot.offset == slot.block.begin;
    const bool checked = whole && batch_.wants_crc(slot.block);
    const uint64_t most = checked ? kCrcBlock : IoQueue::kMaxRequest;
    BlockCrcs crcs(batch_.op(slot.block.op), slot.block);
    while (slot.done < slot.needed) {
      std::byte* const data = slot.data + slot.done;
      const ssize_t n = context_.system().pread(file(slot.block).fd(), data,
                                                std::min<uint64_t>(slot.needed - slot.done, most),
                                                slot.offset + slot.done);
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (n < 0) fail_read(slot, errno);
      if (n == 0) fail_beyond_end(batch_.op(slot.block.op), slot.offset + slot.done);
      if (checked) crcs.add({data, static_cast<size_t>(n)});
      slot.done += static_cast<uint64_t>(n);
    }
    if (checked) slot.crcs = std::move(crcs);
  }

  // All bytes of the slot are read: copies them to the target if necessary and ends the block.
  void complete(ReadSlot& slot) {
    const Buffer buffer = std::move(slot.buffer);  // returned to the pool after done()
    const uint64_t size = slot.block.size();
    std::byte* const bytes = slot.data + (slot.block.begin - slot.offset);
    std::byte* const target = place(slot.block);
    const bool bounced = buffer && target != nullptr;
    const bool wanted = batch_.wants_crc(slot.block) && !slot.crcs;
    BlockCrcs crcs =
        slot.crcs ? std::move(*slot.crcs) : BlockCrcs(batch_.op(slot.block.op), slot.block);
    if (bounced && wanted) {
      crcs.copy({target, size}, {bytes, size});
    } else if (bounced) {
      std::memcpy(target, bytes, size);
    } else if (wanted) {
      crcs.add({bytes, size});
    }
    batch_.finished(slot.block, {bytes, size}, crcs);
  }

  // Ends the process if wait() throws: the kernel may still be writing to the buffers and targets,
  // and nobody could keep them alive.
  void drain() noexcept {
    for (; under_way_ > 0; --under_way_) {
      slots_[queue_->wait().tag] = ReadSlot();
    }
  }

  ReadBatch& batch_;
  PosixContext& context_;
  std::unique_ptr<IoQueue> queue_;
  std::vector<ReadSlot> slots_;
  size_t under_way_ = 0;
  std::optional<PartialRead> waiting_;  // the block that waits for a buffer
  std::deque<PartialRead> asked_;       // blocks that the kernel was asked for, oldest first
  std::vector<std::optional<PartialRead>> populated_;  // blocks that the populator reads, by tag
  size_t populating_ = 0;                              // how many
  std::unique_ptr<IoQueue> populator_;
};

size_t workers_of(const ReadBatch& batch) {
  ThreadPool* const threads = batch.options().threads;
  const size_t most = threads == nullptr ? 1 : threads->size();
  return static_cast<size_t>(std::min<uint64_t>(most, batch.blocks()));
}

void run(ReadBatch& batch) {
  const size_t workers = workers_of(batch);
  const auto work = [&](size_t) { ReadWorker(batch, workers).run(); };
  if (workers > 1) {
    batch.options().threads->parallel_for(workers, work);
  } else if (workers == 1) {
    work(0);
  }
}

}  // namespace

// O_DIRECT is a property of the open file, so the file is opened a second time. By now the name may
// refer to another file, so the device and the inode are compared.
UniqueFd PosixReadable::open_direct() const {
  UniqueFd fd = context_->open_to_read(name_, O_RDONLY | O_NONBLOCK);
  struct stat mine, other;
  if (!fd || ::fstat(fd_.get(), &mine) != 0 || ::fstat(fd.get(), &other) != 0) return {};
  if (mine.st_dev != other.st_dev || mine.st_ino != other.st_ino) return {};
  if (!clear_nonblocking(fd.get()) || !context_->make_direct(fd.get())) return {};
  return fd;
}

int PosixReadable::direct_fd() const {
  if (direct_refused_) return -1;
  std::call_once(once_, [this] { direct_fd_ = open_direct(); });
  return direct_fd_.get();
}

void posix_read(PosixContext& context, std::span<const ReadOp> ops, const ReadOptions& options,
                const ReadDone& done) {
  const bool prefetches = options.prefetched != nullptr;
  ReadBatch batch(context, ops, options, prefetches ? nullptr : &done);
  run(batch);
  if (prefetches) *options.prefetched += batch.fetched();
}

}  // namespace tilestone
