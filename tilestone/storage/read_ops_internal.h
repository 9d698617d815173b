// The checks that every storage makes on a read before it starts, and checksums of what was read.
#pragma once

#include <cstdint>

#include "tilestone/base/bytes.h"
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
// The checksums that an op asks for are the exclusive or of what its parts contribute, in any
// order, from any thread. clear_checksums() first.
void clear_checksums(const ReadOp& op);
void add_checksums(const ReadOp& op, uint64_t at, ByteView bytes);
// The same of bytes [at, at + size) that are in one block and have this CRC-32.
void add_checksum(const ReadOp& op, uint64_t at, uint64_t size, uint32_t crc32);

}  // namespace tilestone
