// Format: how items become bytes and bytes items. It works on bytes and names that it is given and
// does no I/O: on a save it returns recipes that the engine streams, on a load it parses what the
// engine has read. What a tree's items are is the dialect's matter (format/dialect/dialect.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tilestone/format/index.h"
#include "tilestone/geometry/padding.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"

namespace tilestone {

// ---- Saving ----

// Bytes around a tensor's, known beforehand but for the tensor's checksum.
struct Literal {
  Bytes bytes;
  std::vector<uint64_t> crc32_at;  // where its CRC-32 goes, little-endian; zeros in `bytes`
};

// A piece of an item, in file order. Its size in bytes is known before anything is written.
struct Segment {
  uint64_t size = 0;
  std::shared_ptr<const Literal> literal;  // items that are alike share it; null: a tensor's bytes
  const TensorView* tensor = nullptr;      // its C-contiguous bytes; borrowed from the piece
  // The tensor's bytes lie in a larger, zeroed tensor, and that is the segment; null: they are it.
  std::shared_ptr<const Padding> padding = nullptr;
};

// One item at a given place in a file.
struct ItemRecipe {
  uint64_t padding = 0;  // zero bytes before the item, so that its payload is aligned in the file
  uint64_t length = 0;   // bytes of the item (sum of the segments)
  uint64_t payload_offset = 0;    // of the tensor segment, from the item's start
  std::vector<Segment> segments;  // one tensor at most; its CRC-32 only behind it
};

// An item of a file: a chunk, or an object. Borrowed.
struct FileItem {
  const TensorItem* tensor = nullptr;  // with `piece`; null: an object
  const Piece* piece = nullptr;
  const ObjectItem* object = nullptr;
};
// One that has been written.
struct WrittenItem {
  FileItem item;
  uint64_t offset = 0;  // in the file, bytes
  uint64_t length = 0;  // bytes
  ItemChecksums checksums;
};

// Makes the recipes of one file's items, one after the other; used by one thread.
class ItemEncoder {
 public:
  virtual ~ItemEncoder() = default;
  // In formats whose files_have_ends(): the bytes before the first item and after the last one.
  // Both belong to no item; reports have their checksums, and verify compares them. begin_file:
  // asked first, with all items that the file is to have, in their order.
  virtual Bytes begin_file(std::span<const FileItem>) { return {}; }
  // end_file: asked last, with the same items as they were written.
  virtual Bytes end_file(std::span<const WrittenItem>) { return {}; }
  // The bytes of one chunk or object that will stand at `file_offset` (bytes) or, after padding,
  // little beyond it. `piece` is one of the item's; the recipe borrows its data.
  virtual ItemRecipe tensor(const TensorItem& item, const Piece& piece, uint64_t file_offset) = 0;
  virtual ItemRecipe object(const ObjectItem& item, uint64_t file_offset) = 0;
};

// The parts of a data file's name that Format::data_file_name() has put together.
struct DataFileName {
  std::string save_id;
  int rank = 0;
  int index = 0;
};

// ---- Loading ----

// Which bytes of an item must be seen to know its inner structure: the whole of a small item, the
// head and tail of a large one. Relative to the item's start.
struct ProbeRange {
  uint64_t offset = 0;
  uint64_t size = 0;
};

// Where a stored tensor's elements are.
struct StoredPayload {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;         // elements, >= 0; as the writer's tensor had them
  uint64_t offset = 0;  // of element [0, ..., 0], from the item's start (after decoding), bytes
  // The checksummed record that holds the elements: from the item's start, and its CRC-32 where
  // its writer recorded one.
  uint64_t record_offset = 0;
  uint64_t record_size = 0;
  std::optional<uint32_t> record_crc32;
};

// One problem that verify found.
struct ItemFault {
  uint64_t offset = 0;  // from the item's start, bytes
  std::string problem;
};

class Format {
 public:
  virtual ~Format() = default;
  virtual std::string_view name() const = 0;  // "torch_dist"
  // What Megatron-Core's `metadata.json` calls it: sharded_backend and its version.
  virtual int backend_version() const { return 1; }

  // ---- Saving

  // Refuses what the format can't hold, naming the key: Error(kInvalidArgument). Asked on every
  // rank with that rank's items before anything is written.
  virtual void check(const Items& items) const = 0;
  // The cells of a regular grid are files whose names count cells: a tensor's chunks must be cells
  // of one grid (TensorItem::chunk_shape), which the ranks agree on before they write.
  virtual bool needs_grid() const { return false; }
  // The file that a chunk or object has to itself ("KEY/0.1"); nullopt: it goes to one of its
  // rank's data files.
  virtual std::optional<std::string> own_file(const TensorItem& item, const Piece& piece) const;
  virtual std::optional<std::string> own_file(const ObjectItem& item) const;
  // Files' names are fixed, not made of the save id: a save needs a directory of its own.
  virtual bool has_fixed_names() const { return false; }
  // Name of a rank's n-th data file of a save, and what it was made of; nullopt for any other name.
  virtual std::string data_file_name(std::string_view save_id, int rank, int index) const = 0;
  virtual std::optional<DataFileName> parse_data_file_name(std::string_view name) const = 0;
  virtual std::unique_ptr<ItemEncoder> encoder() const = 0;
  // The encoder gives bytes with which a file begins, or ends.
  virtual bool files_have_ends() const { return false; }
  // The format's part of the index. Deterministic.
  virtual Index encode_index(const Metadata& metadata) const = 0;

  // ---- Opening. `names`: of all files of the directory, sorted.

  // Whether they look like a checkpoint of this format.
  virtual bool detect(std::span<const std::string> names) const = 0;
  // Those that have to be read to know the checkpoint. kNotFound when there is none.
  virtual std::vector<std::string> index_files(std::span<const std::string> names) const = 0;
  // Those whose size parse_index() needs and no index holds.
  virtual std::vector<std::string> sized_files(std::span<const std::string> names) const;
  // The part of index_files() that an in-place save has to remove once its own index is published:
  // each rank's own metadata in torch's rank-local mode.
  virtual std::vector<std::string> rank_local_files(std::span<const std::string> names) const;
  // Such a file of one rank: its name, "" in formats that have none; its bytes for what this rank
  // alone has written (deterministic); and what it says, index()ed. Error(kUnsupported) in formats
  // that have none; parsing fails as parse_index().
  virtual std::string rank_index_name(int rank) const;
  virtual Bytes encode_rank_index(const Metadata& metadata) const;
  virtual Metadata parse_rank_index(const DirectoryFiles& files, int rank) const;
  // What the checkpoint holds; the metadata is index()ed. `files.contents` holds index_files() and
  // `files.sizes` sized_files(). Error(kNotFound) when there is none, kCorrupt, kUnsafe or
  // kUnsupported with file and offset.
  virtual Metadata parse_index(const DirectoryFiles& files) const = 0;

  // ---- Loading

  // What to read of a tensor's item to know its structure: the whole of a small item and of one
  // with a codec; nothing where the metadata says all.
  virtual std::vector<ProbeRange> probe(const ItemLocation& at) const = 0;
  // `probed[i]` are the bytes of the i-th range of probe(at); of an item with a codec, the one view
  // is of the decoded bytes. `tensor` and `chunk` are what the metadata says of it, for formats
  // whose items have no header. Everything is checked against the item's length; kCorrupt,
  // kUnsafe and kUnsupported (also where the structure lies outside the bytes probed) name the
  // offset.
  virtual StoredPayload parse_tensor(const StoredTensor& tensor, const StoredChunk& chunk,
                                     const ItemLocation& at,
                                     std::span<const ByteView> probed) const = 0;
  // A whole item (after decoding) as a value.
  virtual Value parse_object(ByteView item) const = 0;
  // Undoes at.codec; max_size bounds the result (bytes), beyond it kCorrupt.
  virtual Bytes decode(Codec codec, ByteView item, uint64_t max_size) const = 0;
  // Checks a whole item (after decoding): structure and every checksum in it. Damage is returned,
  // content that looks like an attack is thrown as kUnsafe.
  virtual std::optional<ItemFault> verify_tensor(const StoredTensor& tensor,
                                                 const StoredChunk& chunk, ByteView item) const = 0;
  virtual std::optional<ItemFault> verify_object(ByteView item) const = 0;
};

}  // namespace tilestone
