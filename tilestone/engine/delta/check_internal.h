// Whether tensors are the base of a delta, and whether the new version has come out.
#pragma once

#include <string>

#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/delta/sums_internal.h"

namespace tilestone::engine {

// Throws Error(kMismatch): what `problem` says of the tensor shows that this is not the delta's
// base. The hint names the versions that lead there.
[[noreturn]] void fail_base(const DeltaFile& delta, const std::string& key,
                            const std::string& problem);
// Throws it unless these are the tensors of the base, with their dtypes and shapes.
void expect_keys(const DeltaFile& delta, const SummedTensors& tensors);
// Throws it unless they also have their CRC-32s.
void expect_base(const DeltaFile& delta, const SummedTensors& tensors);
// Throws Error(kCorrupt) unless the tensors have the CRC-32s of the new version.
void expect_result(const DeltaFile& delta, const SummedTensors& tensors);

}  // namespace tilestone::engine
