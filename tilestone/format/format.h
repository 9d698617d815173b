// A Format turns items into bytes and bytes into items. It works on bytes and file names that it is
// given and does no I/O: in a save it returns recipes that the engine streams, in a load it parses
// what the engine has read. Which items a tree has is decided by the dialect
// (format/dialect/dialect.h).
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

// The bytes of an item before or after the tensor's bytes. They are known before the tensor is
// read, except for the tensor's checksum.
struct Literal {
  Bytes bytes;
  // Offsets in `bytes` at which the tensor's CRC-32 is inserted, little-endian. `bytes` has zeros
  // there.
  std::vector<uint64_t> crc32_at = {};
  ByteView borrowed = {};  // in the place of `bytes`: a part of the FileItem's object

  ByteView view() const { return borrowed.empty() ? ByteView(bytes) : borrowed; }
};

// A part of an item. Its size is known before anything is written.
struct Segment {
  uint64_t size = 0;                       // bytes
  std::shared_ptr<const Literal> literal;  // shared by similar items; null: it is a tensor's bytes
  const TensorView* tensor = nullptr;      // written C-contiguous; borrowed from the Piece
  // If not null, the segment is a larger tensor that holds `tensor` in one corner and zeros
  // elsewhere.
  std::shared_ptr<const Padding> padding = nullptr;
};

// How to write one item at a given place in a file.
struct ItemRecipe {
  uint64_t padding = 0;         // zero bytes before the item; they align its payload in the file
  uint64_t length = 0;          // bytes of the item (the sum of the segments)
  uint64_t payload_offset = 0;  // bytes from the item's start to the tensor segment
  // In file order. At most one is a tensor; only literals after it may contain its CRC-32.
  std::vector<Segment> segments;
};

// An item of a file: a chunk (`tensor` and `piece`) or an object (`object`). Borrows all of them.
struct FileItem {
  const TensorItem* tensor = nullptr;
  const Piece* piece = nullptr;
  const ObjectItem* object = nullptr;
};
// Makes the recipes of one file's items, one after the other. Used by one thread.
class ItemEncoder {
 public:
  virtual ~ItemEncoder() = default;
  // The bytes before the first item, in formats where files_have_headers() is true. They belong to
  // no item. Receipts contain their checksum, and verify compares it. Called first, with all items
  // that the file will have, in file order.
  virtual Bytes begin_file(std::span<const FileItem>) { return {}; }
  // The recipe of one chunk or object that starts at `file_offset` (bytes) plus the recipe's
  // padding. `piece` is one of the item's pieces; the recipe borrows its data.
  virtual ItemRecipe tensor(const TensorItem& item, const Piece& piece, uint64_t file_offset) = 0;
  virtual ItemRecipe object(const ObjectItem& item, uint64_t file_offset) = 0;
};

// ---- Loading ----

// A byte range that must be read to learn an item's inner structure: all of a small item, the
// head and the tail of a large one.
struct ProbeRange {
  uint64_t offset = 0;  // bytes from the item's start
  uint64_t size = 0;    // bytes
};

// Where a stored tensor's elements are. Offsets are from the item's start, after decoding.
struct StoredPayload {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;         // elements, >= 0; those of the writer's tensor
  uint64_t offset = 0;  // of element [0, ..., 0], bytes
  // The record that holds the elements, and its CRC-32 if the writer recorded one.
  uint64_t record_offset = 0;  // bytes
  uint64_t record_size = 0;    // bytes
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
  // The sharded_backend_version in Megatron-Core's `metadata.json`, where name() is the
  // sharded_backend.
  virtual int backend_version() const { return 1; }

  // ---- Saving

  // Throws Error(kInvalidArgument), naming the key, if the format can't hold one of the items.
  // Called on every rank with that rank's items before anything is written.
  virtual void check(const Items& items) const = 0;
  // True if each chunk of a tensor must be a cell of one regular grid (TensorItem::chunk_shape),
  // because a cell is a file that is named by its grid index. The ranks agree on the grid before
  // they write.
  virtual bool needs_grid() const { return false; }
  // The name of the file that holds this chunk or object ("KEY/0.1"): only this one, or all with
  // the same name, which one rank writes. nullopt: it goes into one of its rank's data files.
  virtual std::optional<std::string> separate_file(const TensorItem& item,
                                                   const Piece& piece) const;
  virtual std::optional<std::string> separate_file(const ObjectItem& item) const;
  // The bytes of the longest file name that the tensor or object may need; 0 if it goes into one of
  // its rank's data files.
  virtual size_t longest_name(const TensorItem& item) const;
  virtual size_t longest_name(const ObjectItem& item) const;
  // True if file names don't contain the save id. Each save then needs a directory of its own.
  virtual bool has_fixed_names() const { return false; }
  virtual std::unique_ptr<ItemEncoder> encoder() const = 0;
  // True if the encoder's begin_file() returns bytes.
  virtual bool files_have_headers() const { return false; }
  // The format's part of the index. Deterministic.
  virtual Index encode_index(const Metadata& metadata) const = 0;

  // ---- Opening. `names`: the names of all files in the directory, sorted.

  // Whether the names look like a checkpoint of this format.
  virtual bool detect(std::span<const std::string> names) const = 0;
  // The files that must be read to describe the checkpoint. Error(kNotFound) if there is no
  // checkpoint.
  virtual std::vector<std::string> index_files(std::span<const std::string> names) const = 0;
  // The files whose sizes parse_index() needs because no index contains them.
  virtual std::vector<std::string> sized_files(std::span<const std::string> names) const;
  // Data files that describe their own content, in a header or at their end. Of these, only the
  // parts that next_part() asks for are read.
  virtual std::vector<std::string> self_describing_files(std::span<const std::string> names) const;
  // The next range of such a file that parse_index() needs, from what has been read so far;
  // nullopt: nothing more. The range must lie inside the file. Error(kCorrupt, kUnsafe,
  // kUnsupported).
  virtual std::optional<ProbeRange> next_part(const std::string& name, const FileParts& read) const;
  // Whether a file of this name may hold pieces of tensors, whose other pieces are in files of such
  // names beside it.
  virtual bool may_hold_pieces(std::string_view) const { return false; }
  // The index files that each rank wrote for itself in torch's rank-local mode, a subset of
  // index_files(). A save over such a checkpoint removes them once its own index is published.
  virtual std::vector<std::string> rank_local_files(std::span<const std::string> names) const;
  // The name of one rank's index file in rank-local mode; "" if the format has no such mode.
  virtual std::string rank_index_name(int rank) const;
  // The bytes of that file for what this rank has written. Deterministic. Error(kUnsupported) if
  // the format has no such mode.
  virtual Bytes encode_rank_index(const Metadata& metadata) const;
  // What that file describes; Metadata::index() has been called. Error(kUnsupported) if the format
  // has no such mode; other errors as for parse_index().
  virtual Metadata parse_rank_index(const DirectoryFiles& files, int rank) const;
  // What the checkpoint holds; Metadata::index() has been called. `files.contents` has the bytes of
  // index_files(), `files.sizes` the sizes of sized_files(), and `files.parts` what next_part() has
  // asked for. Error(kNotFound) if there is no checkpoint; kCorrupt, kUnsafe or kUnsupported with
  // file and offset.
  virtual Metadata parse_index(const DirectoryFiles& files) const = 0;

  // ---- Loading

  // The ranges of a tensor's item to read before parse_tensor(): the whole item if it is small or
  // has a codec; nothing if the metadata is sufficient.
  virtual std::vector<ProbeRange> probe(const ItemLocation& at) const = 0;
  // Finds the tensor's elements in an item. `probed[i]` holds the bytes of the i-th range of
  // probe(at); for an item with a codec, the only view holds the decoded bytes. `tensor` and
  // `chunk` come from the metadata, for formats whose items have no header. Everything is checked
  // against the item's length. Throws kCorrupt, kUnsafe, or kUnsupported (also if the structure
  // lies outside the probed ranges), naming the offset.
  virtual StoredPayload parse_tensor(const StoredTensor& tensor, const StoredChunk& chunk,
                                     const ItemLocation& at,
                                     std::span<const ByteView> probed) const = 0;
  // Whether an item's bytes may be another item's too, of a tensor with another name (tied
  // weights).
  virtual bool items_may_share_bytes() const { return false; }
  // The value in a whole item of an object (after decoding). Its tensors share the item's bytes, or
  // are copies if these are borrowed.
  virtual Value parse_object(const SharedBytes& item) const = 0;
  // Decodes an item. Error(kCorrupt) if the result would exceed `max_size` bytes.
  virtual Bytes decode(Codec codec, ByteView item, uint64_t max_size) const = 0;
  // Checks a whole item (after decoding): its structure and every checksum in it. Damage is
  // returned; content that looks like an attack is thrown as kUnsafe.
  virtual std::optional<ItemFault> verify_tensor(const StoredTensor& tensor,
                                                 const StoredChunk& chunk, ByteView item) const = 0;
  virtual std::optional<ItemFault> verify_object(ByteView item) const = 0;
};

}  // namespace tilestone
