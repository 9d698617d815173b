// Moves elements from the bytes that were read into the memory that wants them.
#pragma once

#include <cstdint>

#include "tilestone/engine/read/device_writes_internal.h"
#include "tilestone/engine/read/parts_internal.h"
#include "tilestone/engine/read/reader_internal.h"

namespace tilestone::engine {

// The most bytes of a part that is converted, or that an owner delivers to several ranks.
inline constexpr uint64_t kMaxTemporary = 1u << 20;

// Copies, or converts, the elements that `part` and `transfer` have in common into transfer.target.
// `bytes` are those of `part`, read from a chunk with this payload. A target in device memory is
// written through `writes`, later. May be called from any thread.
void deliver(const StoredPayload& payload, const Part& part, ByteView bytes,
             const Transfer& transfer, DeviceWrites& writes);

// Copies, or converts, all elements of `target`, which may be in device memory, from `source`.
void put_elements(const TensorView& target, const StridedView& source, DType stored);

// Where the bytes of `part` go in the transfer's target, if they go there unchanged and in one
// piece. Null if they have to be scattered, converted or copied to a device.
std::byte* plain_target(const StoredPayload& payload, const Part& part, const Transfer& transfer);

// The size limit of one part for this target, bytes. A part that is converted may grow.
uint64_t part_limit(const Transfer& transfer, DType stored, uint64_t buffer_bytes);

}  // namespace tilestone::engine
