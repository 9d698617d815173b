// Tensors and values as torch.save archives.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "tilestone/format/format.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

// Payloads of at least this many bytes start at a multiple of a page in their file, so that direct
// I/O can put them straight where they belong; smaller ones at a multiple of 64.
inline constexpr uint64_t kPageAlignedFrom = 64u << 10;
inline constexpr uint64_t kPlacedFrom = 1u << 20;  // as in memory: see payload_padding
inline constexpr uint64_t kPage = 4096;

// Recipes of tensors' archives. What stands around the elements is the same for all tensors of one
// dtype and shape, so it is made once for each.
class TensorArchives {
 public:
  // The recipe borrows piece.data.
  ItemRecipe recipe(const Piece& piece, uint64_t file_offset);

 private:
  struct Kind {
    DType dtype = DType::kFloat32;
    Dims shape;
    friend bool operator==(const Kind&, const Kind&) = default;
  };
  struct KindHash {
    size_t operator()(const Kind& kind) const {
      return hash_of(kind.shape) + static_cast<size_t>(kind.dtype);
    }
  };
  struct Archive {
    std::shared_ptr<const Literal> head;
    std::shared_ptr<const Literal> tail;
  };
  static Archive make(const Kind& kind, uint64_t size);

  std::unordered_map<Kind, Archive, KindHash> known_;
};

// Error(kInvalidArgument) for a value that can't be pickled; check_value says of which.
Bytes write_archive(const Value& value);

}  // namespace tilestone::archive
