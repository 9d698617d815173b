// A pickle as a Value: plain kinds, tensors, and everything else told as Opaque.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/format/torch_dist/pickle_reader_internal.h"
#include "tilestone/state/value.h"

namespace tilestone::torch_dist {

// The bytes of a storage record, in memory of their own; one copy however often it is asked for.
// Throws where the record is absent or of another size.
using StorageSource =
    std::function<std::shared_ptr<Bytes>(std::string_view record, uint64_t expected_size)>;

// A container that stands in several places is shared, not copied. Throws Error(kUnsafe) for
// containers that hold themselves, nest deeper than kMaxDepth, or would unfold to more than
// kMaxUnfolded bytes plus kUnfoldedFactor times the pickle's size.
// storages may be empty: then a tensor is Error(kUnsupported).
Value read_value(const Pickle& pickle, const StorageSource& storages);

inline constexpr uint32_t kMaxDepth = 1000;
inline constexpr uint64_t kMaxUnfolded = 16u << 20;
inline constexpr uint64_t kUnfoldedFactor = 64;

}  // namespace tilestone::torch_dist
