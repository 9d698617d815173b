// What a checkpoint holds: keys, shapes, and where each chunk's bytes are. The same for every
// format.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// What the caller of a save said of a tensor: values of plain kinds by name (attribute_bytes() in
// plan/report.h).
using Attributes = std::map<std::string, Value>;

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

// The elements of a chunk whose item holds those of other chunks too, one after the other in one
// dim. The chunks of an item follow one another in StoredTensor::chunks, from its first element on.
struct FlatPart {
  int64_t elements = 0;  // of the item
  int64_t begin = 0;     // the chunk's first one among them
};

struct StoredChunk {
  Box box;
  ItemLocation at;
  std::optional<FlatPart> flat = std::nullopt;  // absent: the item holds this chunk alone
};

// Of the tensor in a chunk's item, but for dims of size 1.
Dims item_shape(const StoredChunk& chunk);
// Of the chunk's first element among those of its item, bytes.
uint64_t begin_in_item(const StoredChunk& chunk, DType dtype);

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

  // The first chunk of the item that chunks[chunk] lies in, mostly itself.
  uint32_t first_of_item(uint32_t chunk) const {
    while (chunks[chunk].flat && chunks[chunk].flat->begin > 0) --chunk;
    return chunk;
  }
};

struct StoredObject {
  std::string key;
  Path path;
  ItemLocation at;
  // The same object once more, in other files; by file. Known from the manifest alone.
  std::vector<ItemLocation> copies = {};
  // What ranks wrote as copies of it and is another object: verify checks it, nobody reads it.
  std::vector<ItemLocation> unlike = {};
};

// The elements of a chunk once more, in an item of another file.
struct StoredCopy {
  uint32_t tensor = 0;  // index into Metadata::tensors
  uint32_t chunk = 0;   // index into its chunks
  ItemLocation at;
};

// In the place of an index into Metadata::copies: the chunk's own item.
inline constexpr uint32_t kNoCopy = ~uint32_t{0};

// Finds the chunks of a tensor by their boxes. Borrows the tensor.
class ChunksByBox {
 public:
  explicit ChunksByBox(const StoredTensor& tensor);
  std::optional<uint32_t> find(const Box& box) const;  // index into the chunks

 private:
  const StoredTensor& tensor_;
  std::vector<uint32_t> order_;
};

class Metadata {
 public:
  std::vector<std::string> files;     // names relative to the checkpoint
  std::vector<StoredTensor> tensors;  // sorted by key after index()
  std::vector<StoredObject> objects;  // sorted by key after index()
  // Known from the manifest alone: the format's index names none of them. By tensor, chunk, file.
  std::vector<StoredCopy> copies;
  std::map<std::string, Attributes, std::less<>> attributes;  // by the tensor's key, likewise
  std::string save_id;      // of the writer; "" when there is none
  std::string writer;       // "Tilestone 0.1.0", "PyTorch (torch_dist 1.0.0)", ...
  std::string dialect;      // "pytorch", "megatron"
  bool rank_local = false;  // each rank wrote its own metadata (torch's use_collectives=False)

  // Sorts and builds the look-up tables; call after filling. Error(kCorrupt) on a key twice.
  void index();
  const StoredTensor* find_tensor(std::string_view key) const;
  const StoredObject* find_object(std::string_view key) const;
  // Those of one chunk.
  std::span<const StoredCopy> copies_of(uint32_t tensor, uint32_t chunk) const;
  // Of a chunk's item (copy == kNoCopy), or of copies[copy], which is one of it.
  const ItemLocation& place(uint32_t tensor, uint32_t chunk, uint32_t copy) const;
  uint64_t tensor_bytes() const;  // sum over tensors of their whole size
};

// Up to `limit` keys of the checkpoint that resemble `key`, for hints ("did you mean ...").
std::vector<std::string> similar_keys(const Metadata& metadata, std::string_view key,
                                      size_t limit = 3);

}  // namespace tilestone
