// Whether tensors are the base of a delta, and which deltas lead to it if they are not.
#pragma once

#include <cstdint>
#include <string>

#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/format/safetensors/delta_index.h"

namespace tilestone::engine {

// Throws Error(kMismatch): what `problem` says of the tensor shows that this is not the delta's
// base.
[[noreturn]] void fail_base(const DeltaFile& delta, const std::string& key,
                            const std::string& problem);
// Throws it unless this is the CRC-32 of the tensor in the base; the message says so if the tensor
// is that of the new version already.
void expect_base(const DeltaFile& delta, const DeltaTensor& tensor, uint32_t crc32);
// Throws Error(kCorrupt) unless this is the CRC-32 of the tensor in the new version.
void expect_result(const DeltaFile& delta, const DeltaTensor& tensor, uint32_t crc32);

}  // namespace tilestone::engine
