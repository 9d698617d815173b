// What a checkpoint holds: keys, shapes, and where each chunk's bytes are. The same for every
// format.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// How an item's bytes are wrapped as a whole.
enum class Codec : uint8_t { kNone = 0, kZstd = 1 };

// Known from the manifest of a checkpoint that Tilestone wrote; absent for others.
struct ItemChecksums {
  uint64_t payload_offset = 0;  // from the item's start, bytes; tensors only
  uint32_t payload_crc32 = 0;   // of the payload's bytes; tensors only
  uint32_t item_crc32 = 0;      // of all the item's bytes
  friend bool operator==(const ItemChecksums&, const ItemChecksums&) = default;
};

// The bytes of one item (a chunk or an object).
struct ItemLocation {
  uint32_t file = 0;  // index into Metadata::files
  Codec codec = Codec::kNone;
  uint64_t offset = 0;  // in the file, bytes
  uint64_t length = 0;  // bytes
  std::optional<ItemChecksums> checksums;
};

struct StoredChunk {
  Box box;
  ItemLocation at;
};

struct StoredTensor {
  std::string key;
  Path path;  // empty: not recorded
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<StoredChunk> chunks;  // may overlap (replicas in rank-local checkpoints)
  // Of the grid that the chunks are cells of, in formats whose items are stored at the size of a
  // cell also where it reaches beyond the tensor.
  std::optional<Dims> chunk_shape = std::nullopt;
  bool fortran_order = false;  // a chunk's elements lie in Fortran order; with chunk_shape only
};

struct StoredObject {
  std::string key;
  Path path;
  ItemLocation at;
};

class Metadata {
 public:
  std::vector<std::string> files;     // names relative to the checkpoint
  std::vector<StoredTensor> tensors;  // sorted by key after index()
  std::vector<StoredObject> objects;  // sorted by key after index()
  std::string save_id;                // of the writer; "" when there is none
  std::string writer;                 // "Tilestone 0.1.0", "PyTorch (torch_dist 1.0.0)", ...
  std::string dialect;                // "pytorch", "megatron"
  bool rank_local = false;  // each rank wrote its own metadata (torch's use_collectives=False)

  // Sorts and builds the look-up tables; call after filling. Error(kCorrupt) on a key twice.
  void index();
  const StoredTensor* find_tensor(std::string_view key) const;
  const StoredObject* find_object(std::string_view key) const;
  uint64_t tensor_bytes() const;  // sum over tensors of their whole size
};

// Up to `limit` keys of the checkpoint that resemble `key`, for hints ("did you mean ...").
std::vector<std::string> similar_keys(const Metadata& metadata, std::string_view key,
                                      size_t limit = 3);

}  // namespace tilestone
