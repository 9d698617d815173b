// Elements on their way from bytes that were read into the memory that wants them.
#pragma once

#include <cstdint>

#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/reader_internal.h"

namespace tilestone::engine {

// Copies (or converts) the common elements of `part`, whose bytes were read from a chunk with this
// payload, and `transfer` into transfer.target. Any thread; device memory is written by one at a
// time.
void deliver(const StoredPayload& payload, const Part& part, ByteView bytes,
             const Transfer& transfer);

// Where the bytes of `part` lie as they are, in one piece, in the transfer's target; null where
// they have to be spread, converted or handed to a device.
std::byte* plain_target(const StoredPayload& payload, const Part& part, const Transfer& transfer);

// The most bytes that one part may have on its way to this target: what does not go to plain host
// memory takes a detour through memory of its own.
uint64_t part_limit(const Transfer& transfer, DType stored, uint64_t buffer_bytes);

}  // namespace tilestone::engine
