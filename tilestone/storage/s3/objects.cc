// How files are read. Opening one brings its first bytes, so that a small file is read with one
// request. Larger ranges are cut into pieces, of which many are in progress; threads that have
// nothing to start wait for the oldest piece and sum it.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/read_ops_internal.h"
#include "tilestone/storage/s3/bucket_internal.h"

namespace tilestone::s3 {
namespace {

constexpr size_t kBeginning = 64u << 10;  // bytes

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

// Those of `bytes`, which begin at a multiple of the op's crc_bytes.
void set_checksums(const ReadOp& op, uint64_t at, ByteView bytes) {
  if (op.crc32 == nullptr) return;
  const uint64_t step = op.crc_bytes == 0 ? std::max<uint64_t>(op.size, 1) : op.crc_bytes;
  uint32_t* out = op.crc32 + at / step;
  do {
    const ByteView block = bytes.first(std::min<uint64_t>(step, bytes.size()));
    *out++ = crc32(block);
    bytes = bytes.subspan(block.size());
  } while (!bytes.empty());
}

// The ops of one read. Each worker starts pieces, while there is room, and then ends the oldest.
class ObjectReads {
 public:
  ObjectReads(std::span<const ReadOp> ops, const ReadOptions& options, const ReadDone& done)
      : ops_(ops), options_(options), done_(done), states_(ops.size()) {}

  void work() {
    while (auto piece = next()) {
      try {
        end(*piece);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        next_op_ = ops_.size();
        in_progress_.clear();
        throw;
      }
    }
  }

 private:
  struct Piece {
    size_t op;
    uint64_t offset, size;  // in the op
    std::optional<Pending<std::string>> pending;
  };
  struct OpState {
    std::byte* target = nullptr;
    Buffer buffer;                  // of an op without a target
    std::atomic<uint64_t> left{0};  // bytes
  };

  // Pieces hold whole blocks, unless these are larger.
  static bool sums_at_end(const ReadOp& op) {
    return op.crc_bytes == 0 || op.crc_bytes > kPartBytes;
  }
  static uint64_t piece_bytes(const ReadOp& op) {
    return sums_at_end(op) ? kPartBytes : kPartBytes / op.crc_bytes * op.crc_bytes;
  }

  std::optional<Piece> next() {
    const std::lock_guard lock(mutex_);
    while (in_progress_.size() < kInProgress && start_one()) {
    }
    if (in_progress_.empty()) return std::nullopt;
    Piece piece = std::move(in_progress_.front());
    in_progress_.pop_front();
    return piece;
  }

  // False: nothing is left, or there is no buffer before an op in progress has ended.
  bool start_one() {
    if (next_op_ == ops_.size()) return false;
    const ReadOp& op = ops_[next_op_];
    OpState& state = states_[next_op_];
    if (next_offset_ == 0 && !begin_op(op, state)) return false;
    Piece piece = {next_op_, next_offset_, std::min(piece_bytes(op), op.size - next_offset_), {}};
    const ReadableObject& object = object_of(op);
    const uint64_t at = op.offset + piece.offset;
    if (piece.size > 0 && at + piece.size > object.beginning.bytes.size()) {
      piece.pending.emplace(object.bucket->client.get(object.key, at,
                                                      {state.target + piece.offset, piece.size},
                                                      object.beginning.etag, options_.deadline));
    }
    next_offset_ += piece.size;
    in_progress_.push_back(std::move(piece));
    if (next_offset_ == op.size) {
      ++next_op_;
      next_offset_ = 0;
    }
    return true;
  }

  bool begin_op(const ReadOp& op, OpState& state) {
    state.target = op.target;
    state.left = op.size;
    if (op.target != nullptr || op.size == 0) return true;
    state.buffer = options_.buffers->try_acquire();
    if (!state.buffer) {
      if (!in_progress_.empty()) return false;
      state.buffer = options_.buffers->acquire(options_.deadline);
    }
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
    if (!sums_at_end(op)) set_checksums(op, piece.offset, {target, piece.size});
    if (state.left.fetch_sub(piece.size) > piece.size) return;
    const ByteView whole(state.target, op.size);
    if (sums_at_end(op)) set_checksums(op, 0, whole);
    done_(piece.op, whole);
    state.buffer = Buffer();
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
  std::mutex mutex_;  // guards the following
  size_t next_op_ = 0;
  uint64_t next_offset_ = 0;
  std::deque<Piece> in_progress_;
};

}  // namespace

std::unique_ptr<ReadableFile> open_object(std::shared_ptr<Bucket> bucket, std::string key,
                                          std::string name) {
  auto beginning = bucket->client.get_beginning(key, kBeginning, call_deadline()).wait();
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
