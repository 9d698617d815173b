// The checks that every storage makes on a read before it starts.
#pragma once

#include <cstdint>

#include "tilestone/storage/storage.h"

namespace tilestone {

// Throws Error(kInvalidArgument) if there is no file, if another storage opened the file
// (own == false), or if the op has no target and is larger than a pooled buffer. Throws
// Error(kCorrupt) if the range extends beyond the end of the file.
void check_read_op(const ReadOp& op, const ReadOptions& options, bool own);

// Throws the error for a range that extends beyond the end of a file of `size` bytes.
[[noreturn]] void fail_beyond_end(const ReadOp& op, uint64_t size);

// The bytes of an op that have one CRC-32, at least 1.
uint64_t crc_step(const ReadOp& op);

}  // namespace tilestone
