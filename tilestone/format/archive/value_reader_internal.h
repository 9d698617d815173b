// Reads a pickle as a Value: plain kinds, tensors, and everything else as Opaque.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

// The bytes of a storage record.
struct StorageBytes {
  std::byte* data = nullptr;
  uint64_t size = 0;
  std::shared_ptr<const void> owner;  // shared by the tensors that view the bytes; null: borrowed
};
// Returns the bytes of a record; tensors are views of them. Throws if the record is missing or has
// another size.
using StorageSource = std::function<StorageBytes(std::string_view record, uint64_t expected_size)>;

// `pickle` must have been parsed with Sizes::kCalls. A container that occurs in several places is
// shared, not copied. If `storages` is empty, a tensor is Error(kUnsupported). Error(kUnsafe) for
// containers that
//  - hold themselves,
//  - nest deeper than kMaxDepth,
//  - need more than kMaxCopied bytes plus kCopiedFactor times the pickle's size, or
//  - unfold to more than kMaxUnfolded bytes plus kCopiedFactor times the pickle's size (each shared
//    container is counted as often as it occurs).
Value read_value(const Pickle& pickle, const StorageSource& storages);

inline constexpr uint32_t kMaxDepth = 1000;
inline constexpr uint64_t kMaxUnfolded = 1u << 30;  // bytes
inline constexpr uint64_t kMaxCopied = 16u << 20;   // bytes
inline constexpr uint64_t kCopiedFactor = 64;

}  // namespace tilestone::archive
