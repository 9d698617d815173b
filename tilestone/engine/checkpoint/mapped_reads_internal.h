// Tensors of an open checkpoint over private mappings of its files (storage/private_map.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tilestone/engine/read/context_internal.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone::engine {

// Thread-safe, because it does not change.
class MappedReads {
 public:
  // Maps the files that can be mapped. Error(kUnsupported) if the storage is no directory.
  explicit MappedReads(const ReadContext& context);

  // For each tensor, by its index in the metadata: its elements in a mapped file, if one item holds
  // them, which no other tensor shares, and they are one aligned run of bytes there; else nullopt:
  // it must be read. Checked is only that the elements lie in their file. Throws as
  // find_payloads().
  std::vector<std::optional<TensorView>> find(const ReadContext& context,
                                              std::span<const uint32_t> tensors) const;

 private:
  struct File {
    std::shared_ptr<std::byte> memory;
    uint64_t size = 0;
  };
  std::map<uint32_t, File> files_;  // by index in the metadata
};

}  // namespace tilestone::engine
