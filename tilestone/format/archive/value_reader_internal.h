// Reads a pickle as a Value: plain kinds, tensors, and everything else as Opaque.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/tensor_node_internal.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

// Makes the value of a tensor. Throws if it can't.
using MakeTensor = std::function<Value(const TensorNode& tensor)>;

// `pickle` must have been parsed with Sizes::kCalls. A container that occurs in several places is
// shared, not copied. If `make` is empty, a tensor is Error(kUnsupported). Error(kUnsafe) for
// containers that
//  - hold themselves,
//  - nest deeper than kMaxValueDepth,
//  - need more than kMaxCopied bytes plus kCopiedFactor times the pickle's size, or
//  - unfold to more than kMaxUnfolded bytes plus kCopiedFactor times the pickle's size (each shared
//    container is counted as often as it occurs).
Value read_value(const Pickle& pickle, const MakeTensor& make);

inline constexpr uint64_t kMaxUnfolded = 1u << 30;  // bytes
inline constexpr uint64_t kMaxCopied = 16u << 20;   // bytes
inline constexpr uint64_t kCopiedFactor = 64;

}  // namespace tilestone::archive
