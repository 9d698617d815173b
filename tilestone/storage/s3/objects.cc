// How files are read. Opening one brings its first bytes, so that a small file is read with one
// request. Larger ranges are cut into pieces, of which many are in progress; threads that have
// nothing to start take pieces that have come and sum them.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/read_ops_internal.h"
#include "tilestone/storage/s3/bucket_internal.h"

namespace tilestone::s3 {
namespace {

constexpr size_t kBeginning = 64u << 10;    // bytes
constexpr uint64_t kLeastPiece = 1u << 20;  // bytes, if a read is in several pieces

class ReadableObject : public ReadableFile {
 public:
  ReadableObject(std::shared_ptr<Bucket> its_bucket, std::string its_key, std::string name,
                 Beginning first)
      : bucket(std::move(its_bucket)),
        key(std::move(its_key)),
        beginning(std::move(first)),
        name_(std::move(name)) {}
  uint64_t size() const override { return beginning.size; }
  const std::string& name() const override { return name_; }

  const std::shared_ptr<Bucket> bucket;
  const std::string key;
  const Beginning beginning;

 private:
  const std::string name_;
};

const ReadableObject& object_of(const ReadOp& op) {
  return static_cast<const ReadableObject&>(*op.file);
}

// Where a piece from `begin` on ends. Objects are uploaded in parts, and a store answers fastest if
// it needs one of them; but a request for a few bytes costs as much as one for more.
uint64_t end_of_piece(uint64_t begin, uint64_t end) {
  if (end - begin <= kPartBytes + kLeastPiece) return end;
  return align_down(begin + kPartBytes + kLeastPiece, kPartBytes);
}

// The ops of one read. Each worker starts pieces, while there is room, and ends one that has come.
class ObjectReads {
 public:
  ObjectReads(std::span<const ReadOp> ops, const ReadOptions& options, const ReadDone& done)
      : ops_(ops), options_(options), done_(done), states_(ops.size()) {}
  ~ObjectReads() { stop(); }

  void work() {
    try {
      while (Pieces::node_type piece = next()) end(piece.mapped());
    } catch (...) {
      stop();
      throw;
    }
  }

 private:
  struct Piece {
    size_t op = 0;
    uint64_t offset = 0, size = 0;  // in the op
    std::optional<Pending<std::string>> pending;
  };
  using Pieces = std::map<uint64_t, Piece>;
  struct OpState {
    std::byte* target = nullptr;
    Buffer buffer;                  // of an op without a target
    std::atomic<uint64_t> left{0};  // bytes
  };

  // Empty: all have come.
  Pieces::node_type next() {
    std::unique_lock lock(mutex_);
    while (start_one()) {
    }
    changed_.wait(
        lock, [&] { return !came_.empty() || (in_progress_.empty() && next_op_ == ops_.size()); });
    if (came_.empty()) return {};
    Pieces::node_type piece = in_progress_.extract(came_.front());
    came_.pop_front();
    while (start_one()) {
    }
    if (in_progress_.empty()) changed_.notify_all();
    return piece;
  }

  // False: nothing is left, or there is no room or buffer before an op that has begun has ended.
  bool start_one() {
    if (next_op_ == ops_.size() || in_progress_.size() == kInProgress) return false;
    const ReadOp& op = ops_[next_op_];
    OpState& state = states_[next_op_];
    if (next_offset_ == 0 && !begin_op(op, state)) return false;
    const ReadableObject& object = object_of(op);
    const uint64_t at = op.offset + next_offset_;
    const uint64_t size = end_of_piece(at, op.offset + op.size) - at;
    const uint64_t number = next_piece_++;
    Piece& piece =
        in_progress_.emplace(number, Piece{next_op_, next_offset_, size, {}}).first->second;
    if (size > 0 && at + size > object.beginning.bytes.size()) {
      piece.pending.emplace(object.bucket->client.get(
          object.key, at, {state.target + next_offset_, size}, object.beginning.etag,
          options_.deadline, [this, number] { came(number); }));
    } else {
      came_.push_back(number);
    }
    next_offset_ += size;
    if (next_offset_ == op.size) {
      ++next_op_;
      next_offset_ = 0;
    }
    return true;
  }

  void came(uint64_t number) {
    const std::lock_guard lock(mutex_);
    if (!in_progress_.contains(number)) return;
    came_.push_back(number);
    changed_.notify_one();
  }

  bool begin_op(const ReadOp& op, OpState& state) {
    clear_checksums(op);
    state.target = op.target;
    state.left = op.size;
    if (op.target != nullptr || op.size == 0) return true;
    state.buffer = options_.buffers->try_acquire();
    if (!state.buffer && (!in_progress_.empty() || held_ > 0)) return false;
    if (!state.buffer) state.buffer = options_.buffers->acquire(options_.deadline);
    ++held_;
    state.target = state.buffer.data();
    return true;
  }

  void end(Piece& piece) {
    const ReadOp& op = ops_[piece.op];
    OpState& state = states_[piece.op];
    std::byte* const target = state.target + piece.offset;
    if (piece.pending) {
      wait_for_piece(*piece.pending, op);
    } else if (piece.size > 0) {
      const Bytes& bytes = object_of(op).beginning.bytes;
      std::memcpy(target, bytes.data() + op.offset + piece.offset, piece.size);
    }
    add_checksums(op, piece.offset, {target, piece.size});
    if (state.left.fetch_sub(piece.size) > piece.size) return;
    done_(piece.op, {state.target, op.size});
    held_ -= state.buffer ? 1 : 0;
    state.buffer = Buffer();
  }

  // Ends what is in progress, outside of the lock, which came() takes.
  void stop() {
    Pieces in_progress;
    const std::lock_guard lock(mutex_);
    next_op_ = ops_.size();
    came_.clear();
    in_progress.swap(in_progress_);
    changed_.notify_all();
  }

  static void wait_for_piece(Pending<std::string>& pending, const ReadOp& op) {
    try {
      pending.wait();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kMismatch) throw;
      throw Error(ErrorCode::kNotFound, "the file was replaced while it was read")
          .with_file(op.file->name())
          .with_errno(ENOENT);
    }
  }

  const std::span<const ReadOp> ops_;
  const ReadOptions& options_;
  const ReadDone& done_;
  std::vector<OpState> states_;
  std::atomic<size_t> held_{0};  // buffers
  std::mutex mutex_;             // guards the following
  std::condition_variable changed_;
  size_t next_op_ = 0;
  uint64_t next_offset_ = 0, next_piece_ = 0;
  Pieces in_progress_;
  std::deque<uint64_t> came_;  // those of in_progress_ that have ended
};

}  // namespace

std::unique_ptr<ReadableFile> open_object(std::shared_ptr<Bucket> bucket, std::string key,
                                          std::string name, const Deadline& deadline) {
  auto beginning = bucket->client.get_beginning(key, deadline, kBeginning).wait();
  if (!beginning) {
    throw Error(ErrorCode::kNotFound, "cannot open a file").with_file(name).with_errno(ENOENT);
  }
  return std::make_unique<ReadableObject>(std::move(bucket), std::move(key), std::move(name),
                                          *std::move(beginning));
}

void read_objects(const Bucket& bucket, const std::string& root, std::span<const ReadOp> ops,
                  const ReadOptions& options, const ReadDone& done) {
  for (const ReadOp& op : ops) {
    const auto* const object = dynamic_cast<const ReadableObject*>(op.file);
    const bool own =
        object != nullptr && object->bucket.get() == &bucket && object->key.starts_with(root);
    check_read_op(op, options, own);
  }
  if (options.deadline.expired()) {
    throw Error(ErrorCode::kTimeout, "the deadline passed before files were read")
        .with_file(ops.empty() ? "" : ops[0].file->name());
  }
  ObjectReads reads(ops, options, done);
  if (options.threads == nullptr) return reads.work();
  const size_t workers = std::min(options.threads->size(), ops.size());
  options.threads->parallel_for(workers, [&](size_t) { reads.work(); });
}

}  // namespace tilestone::s3
