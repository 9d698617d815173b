// A pickle as a Value: plain kinds, tensors, and everything else described as Opaque.
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
  std::shared_ptr<const void> owner;  // tensors over the bytes share it
};
// Throws where the record is absent or of another size. Tensors are views of the bytes.
using StorageSource = std::function<StorageBytes(std::string_view record, uint64_t expected_size)>;

// The pickle is parsed with Sizes::kCalls. A container that stands in several places is shared, not
// copied. Throws Error(kUnsafe) for containers that hold themselves, nest deeper than kMaxDepth,
// need more than kMaxCopied bytes plus kCopiedFactor times the pickle's size, or would unfold to
// more than kMaxUnfolded bytes (each shared container counted as often as it stands).
// storages may be empty: then a tensor is Error(kUnsupported).
Value read_value(const Pickle& pickle, const StorageSource& storages);

inline constexpr uint32_t kMaxDepth = 1000;
inline constexpr uint64_t kMaxUnfolded = 1u << 30;
inline constexpr uint64_t kMaxCopied = 16u << 20;
inline constexpr uint64_t kCopiedFactor = 64;

}  // namespace tilestone::archive
