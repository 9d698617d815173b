// Writes tensors and values as torch.save archives.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tilestone/format/format.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

// Payloads of at least kPageAlignedFrom bytes start at a multiple of a page in their file, so that
// direct I/O can read them directly into their destination. Smaller payloads start at a multiple of
// 64 bytes. Payloads of at least kPlacedFrom bytes are placed as in memory; see payload_padding().
inline constexpr uint64_t kPageAlignedFrom = 64u << 10;  // bytes
inline constexpr uint64_t kPlacedFrom = 1u << 20;        // bytes
inline constexpr uint64_t kPage = 4096;                  // bytes

// Makes the recipes of tensors' archives. The bytes around the elements are the same for all
// tensors with the same dtype and shape; they are made once and shared.
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
  struct ArchiveEnds {
    std::shared_ptr<const Literal> head;
    std::shared_ptr<const Literal> tail;
  };
  static ArchiveEnds make(const Kind& kind, uint64_t size);

  std::unordered_map<Kind, ArchiveEnds, KindHash> known_;
};

// Error(kInvalidArgument) for a value that can't be pickled; see check_value().
Bytes write_archive(const Value& value);
// The same bytes as an item's recipe without padding. It borrows large parts of the value.
ItemRecipe recipe_of_archive(const Value& value);

// A value as a pickle, and its tensors, whose elements are the records "data/0", "data/1", ...:
// for a writer that streams them. The elements are not read; the views share the value's owners.
struct PickledValue {
  Bytes pickle;
  std::vector<TensorView> tensors;
};
PickledValue pickle_value(const Value& value);

}  // namespace tilestone::archive
