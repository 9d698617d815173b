#include <algorithm>

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
  if (op.crc32 == nullptr) return;
  const uint64_t step = crc_step(op);
  for (uint64_t at = 0, i = 0; at < op.size || i == 0; at += step, ++i) {
    op.crc32[i] = crc32(bytes.subspan(at, std::min(step, op.size - at)));
  }
}

}  // namespace tilestone
