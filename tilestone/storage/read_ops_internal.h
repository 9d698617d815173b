// What every storage checks of a read before it touches anything.
#pragma once

#include "tilestone/storage/storage.h"

namespace tilestone {

// kInvalidArgument: no file, a file of another storage (own == false), or an op without a target
// that fits no pooled buffer. kCorrupt: the range reaches beyond the file's end.
void check_read_op(const ReadOp& op, const ReadOptions& options, bool own);

// The error of a range beyond the end of a file that has `size` bytes.
[[noreturn]] void fail_beyond_end(const ReadOp& op, uint64_t size);

}  // namespace tilestone
