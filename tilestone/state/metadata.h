// What a checkpoint holds: keys, shapes, and the location of each chunk's bytes. The same for every
// format.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
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

struct BlockSums;

// The keys of dicts that are not text. A checkpoint's paths have every key of a dict as text, as
// torch writes them; a manifest has what the keys were.

// The keys of one dict. A dict without such keys may be recorded too: then its keys are known to be
// text although they read as ints.
struct DictKeys {
  bool ints = false;                    // every key that reads as an int is one
  std::map<std::string, Value> others;  // further keys, by their text
  // The dict had no keys on some rank. It is there only if no item is at its path or below it.
  bool empty = false;
  uint32_t order = 0;  // if empty: its position among the leaves of the tree
};
// By the path of the dict, in which keys are text and list indices are ints.
using TreeKeys = std::map<Path, DictKeys>;

// The int that the text is the decimal form of: "7" and "-3", not "07" or "+7".
std::optional<int64_t> int_of_key(std::string_view text);
// What a load without a template must know of the keys of a dict; nullopt if they are all text that
// does not read as an int.
std::optional<DictKeys> keys_of(const StateDict& dict);
// The dicts without keys, given the paths of all items. What was empty on one rank may have had
// keys on another one. Dicts that are deeper than kMaxStateDepth are left out.
std::vector<Path> empty_dicts(const TreeKeys& dicts, std::vector<const Path*> items);
// Makes the keys of a loaded dict, which are text, what they were.
void restore_keys(StateDict& dict, const DictKeys& keys);
// Adds the keys that another rank recorded; those that are known stay.
void add_keys(TreeKeys& known, const TreeKeys& more);

// The compression of an item's bytes as a whole.
enum class Codec : uint8_t { kNone = 0, kZstd = 1 };

// From the manifest of a checkpoint that Tilestone wrote. Other checkpoints have none.
struct ItemChecksums {
  uint64_t payload_offset = 0;  // bytes from the item's start; tensors only
  uint32_t payload_crc32 = 0;   // of the payload; tensors only
  uint32_t item_crc32 = 0;      // of the complete item
  // Of the payload's blocks; tensors only. Null if there is only one block, or if not recorded.
  std::shared_ptr<const BlockSums> blocks = nullptr;
  friend bool operator==(const ItemChecksums& a, const ItemChecksums& b);
};

// The bytes of one item (a chunk or an object).
struct ItemLocation {
  uint32_t file = 0;  // index into Metadata::files
  Codec codec = Codec::kNone;
  uint64_t offset = 0;  // in the file, in bytes
  uint64_t length = 0;  // bytes
  std::optional<ItemChecksums> checksums;
};

// Describes a chunk whose item also contains other chunks, one after the other in one dim. The
// chunks of an item are adjacent in StoredTensor::chunks, starting with the one that contains the
// item's first element.
struct FlatPart {
  int64_t elements = 0;  // number of elements in the item
  int64_t begin = 0;     // index of the chunk's first element in the item
};

struct StoredChunk {
  Box box;
  ItemLocation at;
  std::optional<FlatPart> flat = std::nullopt;  // absent if the item only contains this chunk
  // In elements, if those in the item don't follow one another, as in files of other programs.
  std::optional<Dims> strides = std::nullopt;
};

// The shape of the tensor in a chunk's item, except for dims of size 1.
Dims item_shape(const StoredChunk& chunk);
// The byte offset of the chunk's first element among the elements of its item.
uint64_t begin_in_item(const StoredChunk& chunk, DType dtype);

struct StoredTensor {
  std::string key;
  Path path;  // empty if not recorded
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<StoredChunk> chunks;  // may overlap (replicas in rank-local checkpoints)
  // The cell shape of the grid whose cells the chunks are. Set in formats that store every item at
  // the size of a complete cell, even if the cell extends beyond the tensor.
  std::optional<Dims> chunk_shape = std::nullopt;
  bool fortran_order = false;  // elements of a chunk are in Fortran order; only with chunk_shape
  uint32_t order = 0;          // its position among the leaves of the tree; 0 if that is not known

  // The index of the first chunk in the item of chunks[chunk]; usually `chunk` itself.
  uint32_t first_of_item(uint32_t chunk) const {
    while (chunks[chunk].flat && chunks[chunk].flat->begin > 0) --chunk;
    return chunk;
  }
};

struct StoredObject {
  std::string key;
  Path path;
  ItemLocation at;
  // Copies of the object in other files, sorted by file. Only known from the manifest.
  std::vector<ItemLocation> copies = {};
  // What ranks wrote as copies of the object but has different content. Only verify reads these.
  std::vector<ItemLocation> unlike = {};
  uint32_t order = 0;  // its position among the leaves of the tree; 0 if that is not known
  // What it is instead of an object, if Tilestone can't read it: "a tensor of dtype F6_E2M3, shape
  // [4]". "": it is an object.
  std::string unsupported = {};
  // The object itself, if the index has it. `at` is then empty.
  std::shared_ptr<const Value> value = nullptr;
};

// Throws Error(kUnsupported), naming the key, if the object can't be read.
void expect_supported(const StoredObject& object);

// A copy of a chunk's elements, in an item of another file.
struct StoredCopy {
  uint32_t tensor = 0;  // index into Metadata::tensors
  uint32_t chunk = 0;   // index into its chunks
  ItemLocation at;
};

// Used instead of an index into Metadata::copies: the chunk's own item.
inline constexpr uint32_t kNoCopy = ~uint32_t{0};

// Finds the chunks of a tensor by their boxes. The tensor must outlive this.
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
  std::vector<std::string> files;     // names relative to the checkpoint's directory
  std::vector<StoredTensor> tensors;  // sorted by key after index()
  std::vector<StoredObject> objects;  // sorted by key after index()
  // Only known from the manifest: the format's index does not list copies. Sorted by tensor, chunk,
  // file.
  std::vector<StoredCopy> copies;
  std::map<std::string, Attributes, std::less<>> attributes;  // by tensor key; from the manifest
  TreeKeys dict_keys;                                         // from the manifest
  std::string save_id;                                        // "" if the writer has no save ids
  std::string writer;   // "Tilestone 0.1.0", "PyTorch (torch_dist 1.0.0)", ...
  std::string dialect;  // "pytorch", "megatron"
  // What the files hold that the checkpoint does not have, or leaves open; to be shown.
  std::vector<std::string> notes;
  bool rank_local = false;  // each rank wrote its own metadata (torch's use_collectives=False)

  // Sorts tensors and objects for find_tensor() and find_object(). Call it after filling. Throws
  // Error(kCorrupt) if a key occurs twice.
  void index();
  const StoredTensor* find_tensor(std::string_view key) const;
  const StoredObject* find_object(std::string_view key) const;
  // The copies of one chunk.
  std::span<const StoredCopy> copies_of(uint32_t tensor, uint32_t chunk) const;
  // The location of a chunk's own item (copy == kNoCopy) or of copies[copy], a copy of that chunk.
  const ItemLocation& place(uint32_t tensor, uint32_t chunk, uint32_t copy) const;
  uint64_t tensor_bytes() const;  // total size of all tensors
};

// The dicts of the checkpoint that are empty on every rank.
std::vector<Path> empty_dicts(const Metadata& metadata);
// Up to `limit` keys of the checkpoint that resemble `key`, for hints ("did you mean ...").
std::vector<std::string> similar_keys(const Metadata& metadata, std::string_view key,
                                      size_t limit = 3);
// The same as a hint of an error: "similar keys: a, b"; "" if there are none.
std::string similar_keys_hint(const Metadata& metadata, std::string_view key);

}  // namespace tilestone
