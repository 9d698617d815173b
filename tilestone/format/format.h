// Format: how items become bytes and bytes items. A format plans no transfers and, on the save
// path, does no I/O: it returns recipes that the engine streams.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tilestone/plan/report.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

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
};

// One item at a given place in a file.
struct ItemRecipe {
  uint64_t padding = 0;  // zero bytes before the item, so that its payload is aligned in the file
  uint64_t length = 0;   // bytes of the item (sum of the segments)
  uint64_t payload_offset = 0;    // of the tensor segment, from the item's start
  std::vector<Segment> segments;  // one tensor at most; its CRC-32 only behind it
};

// Makes the recipes of one file's items, one after the other; used by one thread.
class ItemEncoder {
 public:
  virtual ~ItemEncoder() = default;
  // The bytes of one chunk or object that will stand at `file_offset` or, after padding, little
  // beyond it.
  virtual ItemRecipe tensor(const std::string& key, const Piece& piece, uint64_t file_offset) = 0;
  virtual ItemRecipe object(const std::string& key, const Value& value, uint64_t file_offset) = 0;
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

  // The dialect: a tree (factories built, non-persistent dropped) as items, and loaded items as a
  // tree of the template's structure. Errors: kInvalidArgument naming the key (two leaves with
  // one key, a Partial placement).
  virtual Items to_items(const StateDict& state) const = 0;
  virtual StateDict from_items(const StateDict& original, const Items& loaded) const = 0;

  // Name of a rank's n-th data file of a save.
  virtual std::string data_file_name(std::string_view save_id, int rank, int index) const = 0;
  virtual std::unique_ptr<ItemEncoder> encoder() const = 0;
  // The checkpoint's own metadata file: its name and bytes. Deterministic.
  virtual std::string metadata_name() const = 0;
  virtual Bytes encode_metadata(const Metadata& metadata) const = 0;

  // True when the storage holds a checkpoint of this format (its metadata file is there).
  virtual bool detect(Storage& storage) const = 0;
  // The files that read_metadata reads (several in a rank-local checkpoint), so that one rank can
  // read them for all. kNotFound when there is none.
  virtual std::vector<std::string> metadata_files(Storage& storage) const = 0;
  // Error(kNotFound) when there is none, kCorrupt or kUnsafe with file and offset. Touches no
  // data file: a storage that holds only metadata_files() is enough.
  virtual Metadata read_metadata(Storage& storage) const = 0;

  // What to read of an item to know its structure: the whole of an object, of a small item and of
  // one with a codec.
  virtual std::vector<ProbeRange> probe(const ItemLocation& at, bool tensor) const = 0;
  // `probed[i]` are the bytes of the i-th range of probe(); of an item with a codec, the one view
  // is of the decoded bytes. Everything is checked against the item's length; kCorrupt, kUnsafe
  // and kUnsupported (also where the structure lies outside the bytes probed) name the offset.
  virtual StoredPayload parse_tensor(const ItemLocation& at,
                                     std::span<const ByteView> probed) const = 0;
  // A whole item (after decoding) as a value.
  virtual Value parse_object(ByteView item) const = 0;
  // Undoes at.codec; max_size bounds the result (bytes), beyond it kCorrupt.
  virtual Bytes decode(Codec codec, ByteView item, uint64_t max_size) const = 0;
  // Checks a whole item (after decoding): structure and every checksum in it. Damage is returned,
  // content that looks like an attack is thrown as kUnsafe.
  virtual std::optional<ItemFault> verify_item(ByteView item) const = 0;
};

}  // namespace tilestone
