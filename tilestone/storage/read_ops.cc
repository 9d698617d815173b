#include <algorithm>
#include <atomic>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/storage/read_only.h"
#include "tilestone/storage/read_ops_internal.h"

namespace tilestone {

void fail_beyond_end(const ReadOp& op, uint64_t size) {
  throw Error(ErrorCode::kCorrupt, "cannot read " + std::to_string(op.size) + " bytes at offset " +
                                       std::to_string(op.offset) + ": the file has only " +
                                       std::to_string(size) + " bytes")
      .with_file(op.file->name());
}

void check_read_op(const ReadOp& op, const ReadOptions& options, bool own) {
  if (op.file == nullptr)
    throw Error(ErrorCode::kInvalidArgument, "the read operation has no file");
  if (!own) {
    throw Error(ErrorCode::kInvalidArgument, "cannot read a file that another storage opened")
        .with_file(op.file->name());
  }
  const uint64_t size = op.file->size();
  if (op.offset > size || op.size > size - op.offset) fail_beyond_end(op, size);
  if (op.target != nullptr || op.size == 0) return;
  if (options.buffers == nullptr || op.size > options.buffers->buffer_bytes()) {
    throw Error(ErrorCode::kInvalidArgument, "a read of " + std::to_string(op.size) +
                                                 " bytes without a target needs a larger buffer")
        .with_file(op.file->name());
  }
}

uint64_t crc_step(const ReadOp& op) {
  return op.crc_bytes > 0 ? op.crc_bytes : std::max<uint64_t>(op.size, 1);
}

void set_checksums(const ReadOp& op, ByteView bytes) {
  clear_checksums(op);
  add_checksums(op, 0, bytes);
}

void clear_checksums(const ReadOp& op) {
  if (op.crc32 == nullptr) return;
  std::fill_n(op.crc32, op.size == 0 ? 1 : block_count(op.size, crc_step(op)), 0);
}

void add_checksums(const ReadOp& op, uint64_t at, ByteView bytes) {
  while (op.crc32 != nullptr && !bytes.empty()) {
    const uint64_t left = crc_step(op) - at % crc_step(op);
    const ByteView part = bytes.first(std::min<uint64_t>(bytes.size(), left));
    add_checksum(op, at, part.size(), crc32(part));
    at += part.size();
    bytes = bytes.subspan(part.size());
  }
}

void add_checksum(const ReadOp& op, uint64_t at, uint64_t size, uint32_t crc32) {
  const uint64_t block = at / crc_step(op);
  const uint64_t end = std::min(op.size, (block + 1) * crc_step(op));
  std::atomic_ref(op.crc32[block]) ^= crc32_combine(crc32, 0, end - at - size);
}

}  // namespace tilestone
