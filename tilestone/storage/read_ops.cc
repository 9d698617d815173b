#include "tilestone/base/error.h"
#include "tilestone/storage/read_ops_internal.h"

namespace tilestone {

void fail_beyond_end(const ReadOp& op, uint64_t size) {
  throw Error(ErrorCode::kCorrupt, "bytes " + std::to_string(op.offset) + " + " +
                                       std::to_string(op.size) + " reach beyond the file's end (" +
                                       std::to_string(size) + " bytes)")
      .with_file(op.file->name());
}

void check_read_op(const ReadOp& op, const ReadOptions& options, bool own) {
  if (op.file == nullptr) throw Error(ErrorCode::kInvalidArgument, "a read without a file");
  if (!own) {
    throw Error(ErrorCode::kInvalidArgument, "a read of a file that another storage opened")
        .with_file(op.file->name());
  }
  const uint64_t size = op.file->size();
  if (op.offset > size || op.size > size - op.offset) fail_beyond_end(op, size);
  if (op.target != nullptr || op.size == 0) return;
  if (options.buffers == nullptr || op.size > options.buffers->buffer_bytes()) {
    throw Error(ErrorCode::kInvalidArgument, "a read of " + std::to_string(op.size) +
                                                 " bytes has no target and fits no pooled buffer")
        .with_file(op.file->name());
  }
}

}  // namespace tilestone
