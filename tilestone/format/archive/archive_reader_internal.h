// Reads one torch.save archive: its records, and the object or tensor that its pickle describes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/format/archive/tensor_node_internal.h"
#include "tilestone/format/archive/zip_reader_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

// All functions throw Error(kCorrupt, kUnsafe, kUnsupported) with the offset in the item.

// An archive and the meaning of its records. Borrows the item.
class Archive {
 public:
  // nullopt: the directory is not in the available ranges.
  static std::optional<Archive> open(const ItemBytes& item);

  const ZipDirectory& directory() const { return directory_; }
  const ZipRecord& pickle() const { return *pickle_; }
  const ZipRecord* byte_order() const;  // null: there is none
  // A record's bytes; nullopt if they are not all in the available ranges.
  std::optional<ByteView> bytes(const ZipRecord& record) const;
  // The record of a storage. `expected_size`: its size in the pickle, bytes. Null: there is no
  // record, and the storage is empty.
  const ZipRecord* storage(std::string_view name, uint64_t expected_size) const;
  // Error(kUnsupported) for a big-endian archive. False: the record is not in the available ranges.
  bool check_byte_order() const;
  std::optional<uint32_t> crc_of(const ZipRecord& record) const;  // nullopt: there are none
  // Where what follows the record begins: the next one, or the directory.
  uint64_t end_of(const ZipRecord& record) const;

 private:
  Archive(const ItemBytes& item, ZipDirectory directory);

  const ItemBytes& item_;
  ZipDirectory directory_;
  const ZipRecord* pickle_ = nullptr;  // in directory_; stays valid when the Archive is moved
  std::string_view top_;
};

// Finds the elements of the only tensor in the archive. nullopt if the available bytes don't
// contain all of the archive's structure that is needed.
std::optional<StoredPayload> locate_tensor(const ItemBytes& item);

// The whole archive as a value. Its tensors are views that share the item's bytes, or own copies of
// their records if these are borrowed.
Value read_archive(const SharedBytes& item);
// The whole archive as a value. Its tensors borrow the item's bytes, which must outlive the value.
Value view_archive(ByteView item);

// Checks every checksum, the structure, and the sizes of the tensors' records. Returns a wrong
// checksum; throws if the structure is damaged.
std::optional<ItemFault> check_archive(ByteView item);
// The same, but damage that can't be read past is returned too. Throws only kUnsafe.
std::optional<ItemFault> find_fault(ByteView item);

}  // namespace tilestone::archive
